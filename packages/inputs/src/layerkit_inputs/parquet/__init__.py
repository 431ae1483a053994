"""Rows of Parquet files through Grain, and bounds on the size of their row groups.

It imports `grain` and `base`.
"""
