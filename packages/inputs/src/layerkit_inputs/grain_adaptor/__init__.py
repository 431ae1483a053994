"""Readers on Grain: its pipelines, ArrayRecord and Parquet files; no TensorFlow."""
