"""Readers of Hugging Face data sets, mapped or streamed."""
