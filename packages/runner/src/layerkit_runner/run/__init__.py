"""The host's work: a run from its first file to its last, its programs, reports and exports.

It may import everything but `cli`, `tools` and `interface`. The loop is `executor.py`.
"""
