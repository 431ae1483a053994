"""Experiments on time series."""
