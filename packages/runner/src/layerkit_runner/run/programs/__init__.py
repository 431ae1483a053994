"""The programs of a run, which train, evaluate and decode, and the functions that build them.

They may import what lies below `run`, and its job, folder and provenance of outputs.
"""
