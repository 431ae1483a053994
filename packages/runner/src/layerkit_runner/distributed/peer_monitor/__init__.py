"""Peer monitors: small processes beside those of a job, which keep logs and name lost processes.

    start.py      start of the peer monitor, from the process that it monitors
    program.py    loop and end of the peer monitor; copies of the output, to the log and terminal
    hub.py        signed messages between peer monitors; the hub that finds the first lost process

A peer monitor is a separate process, so that it can act when the monitored process is aborted from
C++, killed, stopped, or in compiled code that holds Python's lock. It imports only the standard
library and small modules of `layerkit` and `layerkit_runner`. These packages import JAX only when
it is used.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Identity:
    """A process of the job, as messages name it."""

    process: int
    num_processes: int
    host: str
    pid: int

    def __str__(self) -> str:
        return f"process {self.process} of {self.num_processes} (host {self.host}, pid {self.pid})"
