"""Layers for images: convolutions, pooling, residual networks and vision Transformers."""
