"""Views of an experiment before it runs: configuration, layers, weights and batches."""
