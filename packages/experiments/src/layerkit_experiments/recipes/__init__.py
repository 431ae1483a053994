"""What experiments are put together from: models, optimizers, meshes and data.

Recipes may import the other packages and each other, and no experiment.
"""
