"""Inputs that combine other inputs: mixtures of rows or batches, and merged batches."""
