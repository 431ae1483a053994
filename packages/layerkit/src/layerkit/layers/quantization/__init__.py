"""Products in low precision or with low-rank adapters, and weights stored in few bits.

`layerkit.layers.basic.dots.replace_dots` inserts the products into a model.
"""
