"""Inputs made of other inputs: rows or batches by weights, or several batches at once."""
