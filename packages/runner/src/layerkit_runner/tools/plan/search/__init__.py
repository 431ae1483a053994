"""Other meshes, policies and batches for an experiment: what would make it fit, what is best."""
