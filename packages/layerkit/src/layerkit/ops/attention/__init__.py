"""Attention of given queries, keys and values: `dot_product` chooses one of the other modules.

Masks and biases are here too. The modules import each other and `layerkit.ops.soft_cap`.
"""
