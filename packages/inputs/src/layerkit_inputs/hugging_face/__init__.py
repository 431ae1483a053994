"""Inputs of Hugging Face data sets, memory-mapped or streamed."""
