"""Views of an experiment before it runs: configuration, weights and batches."""
