"""Inputs of Grain pipelines and of ArrayRecord files, without TensorFlow.

It imports only `base`.
"""
