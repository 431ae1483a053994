"""The base classes of inputs, and what they stand on: batches, states, padding, files and errors.

It imports nothing else of this package.
"""
