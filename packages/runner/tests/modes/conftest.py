"""Leaves out modules that only processes of their own import, which find `gated_experiment`."""

collect_ignore = ["endless_decoding.py", "unmarked_rows.py"]
