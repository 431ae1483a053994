"""`runner launch`: start a run on this machine or on Slurm, or print the script.

A launcher only turns values into text and queries no cluster, so `--dry_run` prints everything.
"""

from layerkit_runner.tools.launch.command import run_launch

__all__ = ["run_launch"]
