"""Inputs of images in IDX files and of time series in CSV files.

It imports only `base`.
"""
