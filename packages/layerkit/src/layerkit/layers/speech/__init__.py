"""Layers of speech models; see `layerkit.layers`."""
