"""Baselines of `benchmarks/input.py` that read the same batches without this project."""
