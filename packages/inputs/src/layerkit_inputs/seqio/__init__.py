"""Inputs of SeqIO tasks and mixtures, which import TensorFlow when they are built.

It imports `packing` and `base`.
"""
