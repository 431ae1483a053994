"""`runner launch`: start a run on this machine or on Slurm, or print the script.

A launcher only turns values into text and queries no cluster, so `--dry_run` prints everything.

    command.py      parse and check the command line, then print or start
    request.py      the checked command of `runner`, and the script that starts it
    local.py        a script for this machine, and shell lines that other scripts share
    slurm.py        a batch script
"""

from layerkit_runner.tools.launch.command import run_launch

__all__ = ["run_launch"]
