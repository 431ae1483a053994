"""Transformer layers, stacks and pipelines of them, and adapters between them."""
