"""Inputs of text: tokenizers, local files, pairs of texts and records of token ids.

It imports `packing`, `parquet`, `grain` and `base`.
"""
