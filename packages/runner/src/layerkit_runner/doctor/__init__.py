"""`runner doctor`: what this machine is, whether it works, and what to do where it does not.

    command.py   the command: all checks in their order, the page, the JSON form, the exit code
    finding.py   what a check found, and how it travels between processes
    timed.py     runs checks in a process of their own, each with a time limit
    worker.py    what that process does
    machine.py   packages, host, launcher, environment: read, not tried
    storage.py   the folder to write to and that of compiled programs: tried
    devices.py   devices, their arithmetic, attention backends, collectives: tried

Only the worker imports JAX: a device that hangs holds up its own process, and no other.
"""

from layerkit_runner.doctor.command import run_doctor

__all__ = ["run_doctor"]
