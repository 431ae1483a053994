"""Inputs of Hugging Face data sets on this machine.

It imports `text`, `packing`, `parquet` and `base`.
"""
