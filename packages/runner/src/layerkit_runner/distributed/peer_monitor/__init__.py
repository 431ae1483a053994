"""Peer monitors: small processes beside those of a job, which keep logs and name lost processes.

    start.py      start of the peer monitor, from the process that it monitors
    program.py    loop and end of the peer monitor; copies of the output, to the log and terminal
    hub.py        signed messages between peer monitors; the hub that finds the first lost process

A separate process can act when the monitored one is aborted from C++, killed, stopped, or in code
that holds Python's lock. It imports the standard library and small modules without JAX.
"""
