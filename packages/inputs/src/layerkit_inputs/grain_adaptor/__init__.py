"""Inputs of Grain pipelines, ArrayRecord files and Parquet files, without TensorFlow."""
