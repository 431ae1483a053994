"""Rows of token ids: the arrays that models read, and which documents share a row.

It imports only `base`.
"""
