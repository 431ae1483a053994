"""The processes of one job: their connection, exchange of values, and end when one is lost.

A job on several machines is the same command on each. `launchers` finds the other processes, and
`peers` names a lost process to all others, which then end as well, since every step needs all.

Processes exchange small JSON values. All of them must call `gather_values`, `gather_results` and
`run_on_process_0` in the same order. A single process sends nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import jax
import numpy as np
from jax.experimental import multihost_utils

from layerkit.errors import UserError, error_text
from layerkit_runner.distributed.launchers import ClusterInfo, find_cluster
from layerkit_runner.distributed.watchdog import Identity, exit_now, print_error, reporting_to
from layerkit_runner.errors import UsageError, as_usage_error
from layerkit_runner.run_options import RunOptions

if TYPE_CHECKING:
    from layerkit_runner.distributed.peers import Peers

_BIND_VARIABLE = "JAX_COORDINATOR_BIND_ADDRESS"  # which JAX reads
_SMALLEST_MESSAGE = 256
_SECONDS_TO_ARRIVE = 30


@dataclasses.dataclass(frozen=True)
class JoinedProcess:
    """A process that has joined its job; it has a log unless it is the only process."""

    identity: Identity
    job_log_dir: str | None
    log: Path | None = None

    def log_file(self) -> Path:
        """Return the log, or a path for one if the process keeps none."""
        from layerkit_runner.distributed.process_log import log_file

        return self.log or log_file(self.identity, self.job_log_dir)


@contextlib.contextmanager
def joined(flags: RunOptions) -> Iterator[JoinedProcess]:
    """Join the other processes of the job, if there are any, before JAX is used.

    If one of several processes fails, it prints the reason and ends at once, with the exit code of
    the failure, since the others may wait for it in a step.
    """
    cluster = find_cluster(flags, os.environ)
    if cluster is None:
        yield JoinedProcess(Identity(0, 1, socket.gethostname(), os.getpid()), flags.job_log_dir)
        return
    # Not imported by a single process.
    from layerkit_runner.distributed.peers import Peers
    from layerkit_runner.distributed.process_log import copying_output, log_file

    identity = _initialize(cluster)
    with as_usage_error(OSError, owner="log"):  # such as a temporary folder of another user
        log = log_file(identity, flags.job_log_dir)
    with copying_output(identity, log):
        if identity.process == 0:
            print(
                f"processes    {identity.num_processes}, found by {cluster.found_by};"
                f" coordinator {distributed_state().coordinator_address}",
                flush=True,
            )
        peers = Peers(distributed_state().client, identity)
        with reporting_to(peers):
            try:
                yield JoinedProcess(identity, flags.job_log_dir, log)
            except (Exception, KeyboardInterrupt) as error:
                _end(error, peers)
            peers.close()


def gather_values(value: Any) -> list[Any]:
    """Return the JSON values of all processes, in the order of their numbers."""
    if jax.process_count() == 1:
        return [value]
    message = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.int32(message.size))
    # Powers of two, since each new size is compiled.
    room = _SMALLEST_MESSAGE
    while room < sizes.max():
        room *= 2
    padded = np.zeros(room, np.uint8)
    padded[: message.size] = message
    messages = multihost_utils.process_allgather(padded)
    return [json.loads(row[:size].tobytes()) for row, size in zip(messages, sizes, strict=True)]


def gather_results(make: Callable[[], Any]) -> list[Any]:
    """Call a function on every process and return the JSON values in the order of the processes.

    Raises:
      Exception: The error of `make` on this process.
      ValueError: The text of an error on another process.
    """
    value, error = None, None
    try:
        value = make()
    except BaseException as problem:  # raised below, since the other processes wait for this one
        error = problem
    answers = gather_values([value, error and f"{type(error).__name__}: {error_text(error)}"])
    if error is not None:
        raise error
    for process, (_, text) in enumerate(answers):
        if text is not None:
            raise ValueError(f"process {process}: {text}")
    return [value for value, _ in answers]


def run_on_process_0(make: Callable[[], Any]) -> Any:
    """Call a function on process 0 and return its JSON value, or raise its error, on all."""
    return gather_results(lambda: make() if jax.process_index() == 0 else None)[0]


def all_arrive(name: str) -> bool:
    """Return whether all processes of the job call this with the same name within 30 seconds.

    The barrier uses no device, so others may wait in a collective meanwhile.
    """
    client = distributed_state().client
    if client is None:
        return True
    try:
        client.wait_at_barrier(f"layerkit_runner/{name}", _SECONDS_TO_ARRIVE * 1000)
    except jax.errors.JaxRuntimeError:
        return False
    return True


def distributed_state() -> Any:
    """Return JAX's record of this process's connection; its `client` is a store that all share."""
    from jax._src import distributed

    return distributed.global_state


def _initialize(cluster: ClusterInfo) -> Identity:
    from layerkit_runner.distributed.peers import HEARTBEAT_SECONDS

    bind_to = None  # JAX's choice
    if cluster.address is not None and cluster.process_id == 0 and _BIND_VARIABLE not in os.environ:
        bind_to = bind_address(cluster.address)
    # A lost process does not abort the others, which name it.
    jax.config.update("jax_enable_recoverability", val=True)
    try:
        jax.distributed.initialize(
            cluster.address,
            cluster.num_processes,
            cluster.process_id,
            local_device_ids=cluster.local_device_ids,
            coordinator_bind_address=bind_to,
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
        )
    except (RuntimeError, ValueError) as error:
        place = f" at {cluster.address}" if cluster.address else ""
        raise UsageError(
            f"cannot connect the processes of the job, found by {cluster.found_by}{place}: {error}"
        ) from error
    # jax.process_index() would start the devices before they are configured.
    state = distributed_state()
    return Identity(state.process_id, state.num_processes, socket.gethostname(), os.getpid())


def bind_address(address: str) -> str | None:
    """Return the address at which the coordinator listens; None for all interfaces.

    It is the one of `address`, a host and a port, so that no other interface listens; None if the
    others may reach this machine by another one: the host has several, or one that is not of this
    machine, or is a name that resolves to the loopback interface, maybe only here.
    """
    host, _, port = address.rpartition(":")
    host = "127.0.0.1" if host == "localhost" else host.strip("[]")
    try:
        (ip,) = {str(entry[4][0]) for entry in socket.getaddrinfo(host, 0)}
        if ip != host and ipaddress.ip_address(ip.partition("%")[0]).is_loopback:
            return None
        family = socket.AF_INET6 if ":" in ip else socket.AF_INET
        socket.create_server((ip, 0), family=family).close()
    except (OSError, ValueError):
        return None
    return f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"


def _end(error: BaseException, peers: Peers) -> NoReturn:
    if isinstance(error, KeyboardInterrupt):
        exit_now(128 + signal.SIGINT, "interrupted by Ctrl-C")
    if _may_follow_from_a_loss(error):
        peers.confirm_all_alive()
    if isinstance(error, UserError):
        print_error(f"runner: {error}")
        summary, exit_code = str(error), getattr(error, "exit_code", UsageError.exit_code)
    else:
        traceback.print_exception(error)
        summary, exit_code = f"{type(error).__name__}: {error_text(error)}", 1
        if isinstance(error, jax.errors.JaxRuntimeError):
            from layerkit_runner.distributed.peers import LOST_PROCESS_EXIT_CODE

            exit_code = LOST_PROCESS_EXIT_CODE  # Devices and networks may fail only once.
    sys.stdout.flush()
    sys.stderr.flush()
    exit_now(exit_code, " ".join(summary.split()))


def _may_follow_from_a_loss(error: BaseException | None) -> bool:
    """Return whether any error of the chain is not one about what a user wrote.

    A lost process breaks the collectives of the others, and saves and restores contain some.
    """
    while error is not None:
        if not isinstance(error, UserError):
            return True
        error = error.__cause__ or error.__context__
    return False
