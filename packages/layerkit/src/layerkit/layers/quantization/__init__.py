"""Products in fewer bits, as `Dot`s that `layerkit.layers.products.with_dots` puts into a model."""
