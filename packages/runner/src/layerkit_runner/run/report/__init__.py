"""The reports that a run prints before its first step and after its last.

They may import the other modules of `run`, except those that run a mode.
"""
