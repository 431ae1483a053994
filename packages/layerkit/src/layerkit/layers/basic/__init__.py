"""Layers that other layers are made of: products, norms, embeddings, activations, dropout.

They import `layerkit.ops` and `layerkit.base`, and no other folder of layers.
"""
