"""Inputs that combine other inputs: mixtures of rows, and merged batches.

It imports only `base`.
"""
