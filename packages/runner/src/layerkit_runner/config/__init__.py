"""Experiments: found by name, changed from outside, resolved to what will run, and printed."""
