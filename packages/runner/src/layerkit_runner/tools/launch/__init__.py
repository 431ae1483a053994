"""`runner launch`: start a run on this machine or on Slurm, or print the script.

A launcher only turns values into text and queries no cluster, so `--dry_run` prints everything.
"""
