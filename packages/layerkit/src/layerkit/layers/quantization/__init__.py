"""Low-precision products, which `layerkit.layers.products.with_dots` inserts into a model."""
