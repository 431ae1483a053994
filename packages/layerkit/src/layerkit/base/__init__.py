"""What every layer builds on: the base layer and model, weights, sharding and summaries.

The modules import each other, `layerkit.config` and `layerkit.errors`.
"""
