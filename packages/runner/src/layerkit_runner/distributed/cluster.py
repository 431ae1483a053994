"""The processes of one job: their connection, exchange of values, and end when one is lost.

A job on several machines is the same command on each. Slurm, Open MPI, torchrun, Kubernetes or a
TPU pod describe the job; elsewhere `--coordinator_address`, `--num_processes` and `--process_id`
do. A peer monitor runs beside each process. It keeps the log of the process, and names a lost
process to all others, which then end as well, since every step needs all processes.

Processes exchange small JSON values. All of them must call `gather_values`, `gather_results` and
`run_on_process_0` in the same order. A single process sends nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import ipaddress
import json
import os
import secrets
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import jax
import numpy as np
from jax.experimental import multihost_utils

from layerkit.errors import UserError, error_text
from layerkit_runner.distributed.launchers import (
    SEPARATE_JOBS,
    check_processes,
    find_launch,
    local_device_ids,
)
from layerkit_runner.distributed.watchdog import SECONDS_TO_LEARN, Identity, notifying_others
from layerkit_runner.errors import UsageError
from layerkit_runner.files.atomic_write import absolute, check_links, is_remote, private_folder
from layerkit_runner.run_options import AUTO_ADDRESS, RunOptions

if TYPE_CHECKING:
    from layerkit_runner.distributed.peer_monitor.start import PeerMonitor

# Exit code of a process that ends because another was lost: sysexits.h's "try again".
LOST_PROCESS_EXIT_CODE = 75

# JAX notices a lost process too, and aborts. The peer monitors are faster and know its name.
JAX_HEARTBEAT_SECONDS = 60

_EXCHANGE_SECONDS = 60
_HUB_KEY = "layerkit_runner/hub"
_BIND_VARIABLE = "JAX_COORDINATOR_BIND_ADDRESS"  # which JAX reads
_ALL_INTERFACES = "::"
_SMALLEST_MESSAGE = 256
_SECONDS_TO_ARRIVE = 30


@dataclasses.dataclass(frozen=True)
class ClusterInfo:
    """The coordinator and numbers of a process; None leaves a value to JAX's detection.

    `local_device_ids` are the GPUs of this process, an empty list for all visible ones.
    """

    address: str | None
    num_processes: int | None
    process_id: int | None
    local_device_ids: list[int] | None
    found_by: str


@dataclasses.dataclass(frozen=True)
class JoinedProcess:
    """A process that has joined its job; it has a log unless it is the only process."""

    identity: Identity
    job_log_dir: str | None
    log: Path | None = None

    def log_file(self) -> Path:
        """Return the log, or a path for one on this machine if the process keeps none."""
        return self.log or log_file(self.identity, self.job_log_dir)


@contextlib.contextmanager
def joined(flags: RunOptions) -> Iterator[JoinedProcess]:
    """Join the other processes of the job, if there are any, before JAX is used.

    If one of several processes fails, it prints the reason and ends at once, with the exit code of
    the failure, since the others may wait for it in a step.
    """
    cluster = find_cluster(flags, os.environ)
    identity = Identity(0, 1, socket.gethostname(), os.getpid())
    if cluster is not None:
        identity = _initialize(cluster)
    if cluster is None or identity.num_processes == 1:
        yield JoinedProcess(identity, flags.job_log_dir)
        return
    try:
        log = log_file(identity, flags.job_log_dir)
    except OSError as error:
        raise UsageError(f"cannot write the log: {error}") from error
    monitor = _start_monitor(identity, log)
    wait_for_others = None
    if identity.process == 0:
        print(
            f"processes    {identity.num_processes}, found by {cluster.found_by};"
            f" coordinator {distributed_state().coordinator_address}",
            flush=True,
        )
        # Without the coordinator in this process, JAX aborts the others before they report.
        wait_for_others = functools.partial(monitor.wait_for_others, SECONDS_TO_LEARN)
    try:
        with notifying_others(monitor.failed, wait_for_others):
            yield JoinedProcess(identity, flags.job_log_dir, log)
    except Exception as error:
        _end(error, monitor, wait_for_others)
    except KeyboardInterrupt:
        monitor.failed("interrupted by Ctrl-C")
        os._exit(128 + signal.SIGINT)  # without waiting for the others
    monitor.close()


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


def find_cluster(flags: RunOptions, environ: Mapping[str, str]) -> ClusterInfo | None:
    """Return the coordinator and number of this process; None if it is the only one of its job."""
    check_processes(flags, environ)
    if flags.num_processes == 1:
        return None
    launch = find_launch(environ)
    if launch is not None and launch.num_processes == 1:
        if flags.num_processes is None:
            return None
        launch = None
    address = flags.coordinator_address
    is_auto = address in (None, AUTO_ADDRESS)
    if launch is not None:
        return ClusterInfo(
            launch.address if is_auto else address,
            launch.num_processes,
            launch.process_id,
            local_device_ids(launch, environ),
            launch.name,
        )
    if not is_auto:
        return ClusterInfo(address, flags.num_processes, flags.process_id, None, "the flags")
    found_by = _detected_cluster(environ, is_required=address is not None)
    if found_by is None:
        return None
    return ClusterInfo(None, flags.num_processes, flags.process_id, None, found_by)


def _detected_cluster(environ: Mapping[str, str], *, is_required: bool) -> str | None:
    """Return the name of a TPU pod or an indexed Kubernetes job of several processes, else None."""
    # Not public, but the public `initialize` does not return the number of processes.
    from jax._src import clusters

    index = environ.get("JOB_COMPLETION_INDEX")
    for cluster, name in (
        (clusters.GkeTpuCluster, "the TPU pod"),
        (clusters.GceTpuCluster, "the TPU pod"),
        (clusters.K8sCluster, "Kubernetes"),
    ):
        if cluster is clusters.K8sCluster and index is None:
            continue
        try:
            if cluster.is_env_present():
                return name if cluster.get_process_count() > 1 else None
        except Exception as error:
            problem = f"cannot ask {name} for the other processes: {error}"
            raise UsageError(problem, hint=SEPARATE_JOBS) from error
    flags = "--coordinator_address=HOST:PORT, --num_processes=N and --process_id=I"
    if index is not None and "KUBERNETES_SERVICE_HOST" in environ:
        raise UsageError(
            "cannot find the other processes of an indexed Kubernetes job",
            field="JOB_COMPLETION_INDEX",
            value=index,
            expected=f"the package that pip install 'jax[k8s]' installs, or {flags}",
            hint=SEPARATE_JOBS,
        )
    if is_required:
        raise UsageError(
            field="--coordinator_address",
            value=AUTO_ADDRESS,
            expected="a process of Slurm (inside srun), Open MPI, torchrun, an indexed Kubernetes"
            " job or a TPU pod",
            hint=f"Elsewhere, set {flags}.",
        )
    return None


def _initialize(cluster: ClusterInfo) -> Identity:
    bind_to = None  # JAX's choice
    if cluster.address is not None and cluster.process_id == 0 and _BIND_VARIABLE not in os.environ:
        host, _, port = cluster.address.rpartition(":")
        address = bind_address(host.strip("[]"))
        bind_to = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
    try:
        jax.distributed.initialize(
            cluster.address,
            cluster.num_processes,
            cluster.process_id,
            local_device_ids=cluster.local_device_ids,
            coordinator_bind_address=bind_to,
            heartbeat_timeout_seconds=JAX_HEARTBEAT_SECONDS,
        )
    except (RuntimeError, ValueError) as error:
        place = f" at {cluster.address}" if cluster.address else ""
        raise UsageError(
            f"cannot connect the processes of the job, found by {cluster.found_by}{place}: {error}"
        ) from error
    # jax.process_index() would start the devices before they are configured.
    state = distributed_state()
    return Identity(state.process_id, state.num_processes, socket.gethostname(), os.getpid())


def _start_monitor(identity: Identity, log: Path) -> PeerMonitor:
    from layerkit_runner.distributed.peer_monitor.start import PeerMonitor

    state = distributed_state()
    listener = None
    # The coordinator is in process 0, as the hub is.
    host = str(state.coordinator_address).rpartition(":")[0].strip("[]")
    if identity.process == 0:
        listener = listen(host, backlog=identity.num_processes)
        about = {
            "port": listener.getsockname()[1],
            "identity": dataclasses.asdict(identity),
            "key": secrets.token_hex(32),
        }
        state.client.key_value_set(_HUB_KEY, json.dumps(about))
    about = json.loads(state.client.blocking_key_value_get(_HUB_KEY, _EXCHANGE_SECONDS * 1000))
    if listener is not None:
        bound = listener.getsockname()[0]
        host = "127.0.0.1" if ipaddress.ip_address(bound).is_unspecified else bound
    return PeerMonitor(
        identity,
        hub_address=(host, about["port"]),
        hub=Identity(**about["identity"]),
        listener=listener,
        key=bytes.fromhex(about["key"]),
        log=log,
        exit_code=LOST_PROCESS_EXIT_CODE,
    )


def log_file(identity: Identity, job_log_dir: str | None) -> Path:
    """Return `DIR/logs/process_0003.log`, or a file in a folder of this machine and print why."""
    name = f"process_{identity.process:04d}.log"
    directory = os.fspath(absolute(job_log_dir or "."))
    folder = Path(directory) / "logs"
    try:
        if is_remote(directory):
            raise OSError("a store cannot append to files")
        check_links(directory)
        folder.mkdir(parents=True, exist_ok=True)
        return folder / name
    except OSError as error:
        reason = str(error)
    digest = hashlib.sha256(directory.encode()).hexdigest()[:8]
    local = private_folder(Path(tempfile.gettempdir()) / f"layerkit_logs_{os.getuid()}_{digest}")
    if identity.process == 0:
        print(
            f"logs         in {local} of each process's machine, not in {directory}: {reason}",
            flush=True,
        )
    return local / name


def _end(
    error: Exception, monitor: PeerMonitor, wait_for_others: Callable[[], None] | None
) -> NoReturn:
    if _may_follow_from_a_loss(error):
        # The peer monitor ends this process as soon as it learns that another one is lost.
        time.sleep(SECONDS_TO_LEARN)
    if isinstance(error, UserError):
        print(f"runner: {error}", file=sys.stderr)
        summary, exit_code = str(error), getattr(error, "exit_code", UsageError.exit_code)
    else:
        traceback.print_exception(error)
        summary, exit_code = f"{type(error).__name__}: {error_text(error)}", 1
    monitor.failed(" ".join(summary.split())[:1000])
    sys.stdout.flush()
    sys.stderr.flush()
    if wait_for_others is not None:
        wait_for_others()
    os._exit(exit_code)


def _may_follow_from_a_loss(error: BaseException | None) -> bool:
    """Return whether any error of the chain is not one about what a user wrote.

    A lost process breaks the collectives of the others, and saves and restores contain some.
    """
    while error is not None:
        if not isinstance(error, UserError):
            return True
        error = error.__cause__ or error.__context__
    return False


def bind_address(host: str) -> str:
    """Return the address at which to listen for processes that know this machine as `host`.

    It is the one address of `host`, so that no other interface listens. It is all interfaces if the
    others may reach this machine by another address: `host` has several, or one that is not of this
    machine, or is a name that resolves to the loopback interface, maybe only here.
    """
    try:
        addresses = {str(entry[4][0]) for entry in socket.getaddrinfo(host, 0)}
    except OSError:
        return _ALL_INTERFACES
    if host == "localhost":
        return "127.0.0.1" if "127.0.0.1" in addresses else addresses.pop()
    if len(addresses) != 1:
        return _ALL_INTERFACES
    (address,) = addresses
    if address != host and ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        return _ALL_INTERFACES
    try:
        _listen(address, backlog=1).close()
    except OSError:
        return _ALL_INTERFACES
    return address


def listen(host: str, *, backlog: int) -> socket.socket:
    """Return a socket that listens at a free port of `bind_address(host)`."""
    address = bind_address(host)
    if address != _ALL_INTERFACES:
        return _listen(address, backlog=backlog)
    with contextlib.suppress(OSError, ValueError):  # IPv6 may be off
        return socket.create_server(
            (address, 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog
        )
    return socket.create_server(("", 0), backlog=backlog)


def _listen(address: str, *, backlog: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=backlog)
