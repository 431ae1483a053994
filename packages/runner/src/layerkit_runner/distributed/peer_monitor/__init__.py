"""A small process beside each process of a job of several: it keeps the log and names the lost.

    program.py    what the companion runs: its one loop, and when it ends
    log_copy.py   what the process prints → its log file, and what of it people see
    peers.py      who was lost, and how: the hub beside process 0, a member beside each process
    link.py       JSON lines over a socket, for both ends

It is a process of its own because what it is for happens when the other cannot help: aborted from
C++, killed, stopped, or in compiled code that holds Python's lock. It imports nothing but the
standard library, and `layerkit_runner.distributed.distributed` starts it.
"""
