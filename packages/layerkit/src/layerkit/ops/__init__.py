"""Functions of arrays without weights: losses, attention, movement of rows, rematerialization.

Ops import each other, `layerkit.base`, `layerkit.config` and `layerkit.errors`, and never a layer.
"""
