"""`runner launch`: start a run on this machine, Slurm, TPUs or Kubernetes, or print the commands.

A launcher only turns values into text and queries no cluster, so `--dry_run` prints everything.

    command.py      parse, check, then print or start
    request.py      the launched command and its values, checked; files to write, commands to run
    local.py        a script for this machine, and shell lines that other scripts share
    slurm.py        a batch script
    tpu.py          gcloud commands for TPU VMs and queued resources; TPU types
    kubernetes.py   a JobSet
"""

from layerkit_runner.tools.launch.command import run_launch

__all__ = ["run_launch"]
