"""`runner launch`: the same command on a GPU machine, Slurm, TPUs or Kubernetes.

    command.py      the command: parse, check, then print or start
    request.py      what is to be started, checked before anything is handed over
    data_fields.py  where its data are, if anything says so
    recipe.py       files to write and commands to run: printed by a dry run, or done
    flag_values.py  what values of its flags may be
    values.py       checks of all values, before anything is made from them
    environment.py  environment variables, with their values or by reference
    scripts.py      the shell lines that start a run, wait for it and start it again
    local.py        a script for this machine
    slurm.py        a batch script
    tpu.py          TPU VMs and queued resources, one slice or several
    tpu_types.py    names and sizes of TPUs
    kubernetes.py   a JobSet

A launcher only makes text from values: it asks no cluster anything, so a dry run is the whole truth
about what would be started.
"""

from layerkit_runner.tools.launch.command import run_launch

__all__ = ["run_launch"]
