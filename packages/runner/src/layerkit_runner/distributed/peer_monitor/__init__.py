"""A small process beside each process of a job of several: it keeps the log and names lost peers.

    start.py      starting it, from the process that it monitors
    program.py    what it runs: its one loop, and when it ends
    hub.py        signed messages between peer monitors; the hub that finds the first loss
    log_tee.py    copies what the process prints to its log, and parts of it to people

It is a separate process because it acts when the other cannot: aborted from C++, killed, stopped,
or in compiled code that holds Python's lock. It imports nothing but the standard library.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Identity:
    """A process as its peers name it.

    Attributes:
      process: Number of the process.
      num_processes: Number of processes of its job.
      host: Name of its machine.
      pid: Process id on that machine.
    """

    process: int
    num_processes: int
    host: str
    pid: int

    def __str__(self) -> str:
        return f"process {self.process} of {self.num_processes} (host {self.host}, pid {self.pid})"
