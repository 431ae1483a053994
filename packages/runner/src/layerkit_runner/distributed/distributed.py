"""The processes of one job: how they find one another, and that none waits for one that is gone.

A job on several machines is the same command on each. What Slurm, Open MPI, torchrun, Kubernetes or
a TPU pod says is found out; elsewhere `--coordinator_address`, `--num_processes` and `--process_id`
say it. Beside each process runs a companion, which keeps its log and names the process that is lost
to all others, which then end as well, since no step can be made without it.
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
from typing import Any, NoReturn

import jax

from layerkit_runner.distributed.forced_exit import told_to_others
from layerkit_runner.distributed.launchers import check_processes, find_launch, local_device_ids
from layerkit_runner.distributed.listening import bind_address, listen
from layerkit_runner.distributed.peer_monitor.start import Identity, StartedCompanion
from layerkit_runner.distributed.stop_agreement import KeyValueStore
from layerkit_runner.errors import UsageError
from layerkit_runner.files.atomic_write import absolute, check_links, private_folder
from layerkit_runner.run_options import AUTO_ADDRESS, RunOptions

# Of a process that ends because another was lost: sysexits.h's "try again".
LOST_PROCESS_EXIT_CODE = 75

# JAX notices a lost process too, and aborts. The companions are faster and know its name.
JAX_HEARTBEAT_SECONDS = 60

_SECONDS_TO_LEARN = 6.0
_EXCHANGE_SECONDS = 60
_SECONDS_TO_ARRIVE = 30
_KEY = "layerkit_runner/"
_BIND_VARIABLE = "JAX_COORDINATOR_BIND_ADDRESS"  # which JAX reads


@dataclasses.dataclass(frozen=True)
class Meeting:
    """How a process finds the others; None where JAX finds out.

    Attributes:
      address: `host:port` of the coordinator.
      num_processes: How many there are.
      process_id: Which this is.
      local_device_ids: The GPUs of this process, an empty list for all that it sees.
      found_by: Who said so.
    """

    address: str | None
    num_processes: int | None
    process_id: int | None
    local_device_ids: list[int] | None
    found_by: str


@dataclasses.dataclass(frozen=True)
class JoinedProcess:
    """This process in its job.

    Attributes:
      identity: Which it is.
      options: Of the run.
      log: The file that keeps what it prints; None for a process that is the whole job.
    """

    identity: Identity
    options: RunOptions
    log: Path | None = None

    def log_file(self) -> Path:
        """A file on this machine to append to."""
        return self.log or log_file(self.identity, self.options)


@contextlib.contextmanager
def joined(options: RunOptions) -> Iterator[JoinedProcess]:
    """Joins the other processes of the job, if there are any; to be entered before JAX is used.

    Where several processes run and this one fails, it says why and ends at once, with the exit code
    of the failure: the others may wait for it in a step, and would wait for long.

    Raises:
      UsageError: the processes cannot find one another.
    """
    meeting = find_meeting(options, os.environ)
    identity = Identity(0, 1, socket.gethostname(), os.getpid())
    if meeting is not None:
        identity = _initialize(meeting)
    if meeting is None or identity.num_processes == 1:
        yield JoinedProcess(identity, options)
        return
    try:
        log = log_file(identity, options)
    except OSError as error:
        raise UsageError(f"The log cannot be written: {error}") from error
    companion = _start_companion(identity, log)
    if identity.process == 0:
        address = _coordinator_address()
        print(
            f"processes    {identity.num_processes}, found by {meeting.found_by};"
            f" they meet at {address}",
            flush=True,
        )

    wait_for_others = None
    if identity.process == 0:
        # The coordinator is in this process, and without it the others abort before they can speak.
        wait_for_others = functools.partial(companion.wait_for_others, _SECONDS_TO_LEARN)
    try:
        with told_to_others(companion.failed, wait_for_others):
            yield JoinedProcess(identity, options, log)
    except Exception as error:
        _end(error, companion, wait_for_others)
    except KeyboardInterrupt:
        companion.failed("it was interrupted by Ctrl-C")
        os._exit(128 + signal.SIGINT)  # the others are not waited for
    companion.close()


def find_meeting(options: RunOptions, environ: Mapping[str, str]) -> Meeting | None:
    """How this process finds the others; None if it is the whole job.

    Raises:
      UsageError: flags and environment contradict each other, or nothing says where they meet.
    """
    check_processes(options, environ)
    if options.num_processes == 1:
        return None
    launch = find_launch(environ)
    if launch is not None and launch.num_processes == 1:
        if options.num_processes is None:
            return None
        launch = None
    address = options.coordinator_address
    is_auto = address in (None, AUTO_ADDRESS)
    if launch is not None:
        return Meeting(
            launch.address if is_auto else address,
            launch.num_processes,
            launch.process_id,
            local_device_ids(launch, environ),
            launch.name,
        )
    if not is_auto:
        return Meeting(address, options.num_processes, options.process_id, None, "the flags")
    cluster = _cluster_to_ask(environ, must_be=address == AUTO_ADDRESS)
    if cluster is None:
        return None
    return Meeting(None, options.num_processes, options.process_id, None, cluster)


def _cluster_to_ask(environ: Mapping[str, str], *, must_be: bool) -> str | None:
    """A TPU pod or an indexed Kubernetes job of several; None if there is neither.

    Every pod of Kubernetes looks alike from inside, a notebook as well, so only one that has a
    number in a job is taken for one of several.
    """
    # Not public, but the public `initialize` cannot be asked how many there are.
    from jax._src import clusters

    for cluster, name in (
        (clusters.GkeTpuCluster, "the TPU pod"),
        (clusters.GceTpuCluster, "the TPU pod"),
        (clusters.K8sCluster, "Kubernetes"),
    ):
        if cluster is clusters.K8sCluster and "JOB_COMPLETION_INDEX" not in environ:
            continue
        try:
            if cluster.is_env_present():
                return name if cluster.get_process_count() > 1 else None
        except Exception as error:
            raise UsageError(
                f"{name} cannot be asked for the other processes: {error}. --num_processes=1 makes"
                " this process a job of its own."
            ) from error
    if "JOB_COMPLETION_INDEX" in environ and "KUBERNETES_SERVICE_HOST" in environ:
        raise UsageError(
            "this is process"
            f" {environ['JOB_COMPLETION_INDEX']} of an indexed Kubernetes job; to find the others,"
            " pip install 'jax[k8s]', or say --coordinator_address, --num_processes and"
            " --process_id. --num_processes=1 makes every process a job of its own."
        )
    if must_be:
        raise UsageError(
            f"--coordinator_address={AUTO_ADDRESS}: this is none of Slurm (inside srun), Open"
            " MPI, torchrun, an indexed Kubernetes job or a TPU pod; say"
            " --coordinator_address=HOST:PORT, --num_processes=N and --process_id=I."
        )
    return None


def _initialize(meeting: Meeting) -> Identity:
    try:
        jax.distributed.initialize(
            meeting.address,
            meeting.num_processes,
            meeting.process_id,
            local_device_ids=meeting.local_device_ids,
            coordinator_bind_address=_coordinator_bind_address(meeting),
            heartbeat_timeout_seconds=JAX_HEARTBEAT_SECONDS,
        )
    except (RuntimeError, ValueError) as error:
        place = f" at {meeting.address}" if meeting.address else ""
        raise UsageError(
            f"the processes of the job, found by {meeting.found_by}, cannot find one"
            f" another{place}: {error}"
        ) from error
    # Asking jax.process_index() would start the devices, whose settings are still to be made.
    state = _distributed_state()
    return Identity(state.process_id, state.num_processes, socket.gethostname(), os.getpid())


def _coordinator_bind_address(meeting: Meeting) -> str | None:
    """Return where JAX's coordinator, in process 0, listens; None where JAX decides."""
    if meeting.address is None or meeting.process_id != 0 or _BIND_VARIABLE in os.environ:
        return None
    host, _, port = meeting.address.rpartition(":")
    address = bind_address(host.strip("[]"))
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def all_arrive(name: str) -> bool:
    """Return whether all processes of the job call this with the same name at about the same time.

    Processes meet at the coordinator, not on their devices. So a process can ask this while others
    wait in a collective that it never enters.
    """
    client = _distributed_state().client
    if client is None:
        return True
    try:
        client.wait_at_barrier(f"{_KEY}{name}", _SECONDS_TO_ARRIVE * 1000)
    except jax.errors.JaxRuntimeError:
        return False
    return True


def _distributed_state() -> Any:
    from jax._src import distributed

    return distributed.global_state


def coordinator_store() -> KeyValueStore:
    """Return the key-value store that the processes of this job share."""
    store: KeyValueStore = _distributed_state().client
    return store


def _coordinator_address() -> str:
    return str(_distributed_state().coordinator_address)


def _start_companion(identity: Identity, log: Path) -> StartedCompanion:
    """Starts the companion; the hub, beside process 0, is announced through JAX's coordinator."""
    client = _distributed_state().client
    listener = None
    entry = f"{_KEY}hub"
    # By this name the coordinator, which is in process 0, is found.
    host = _coordinator_address().rpartition(":")[0].strip("[]")
    if identity.process == 0:
        listener = listen(host, backlog=identity.num_processes)
        about = {
            "port": listener.getsockname()[1],
            "identity": dataclasses.asdict(identity),
            "key": secrets.token_hex(32),
        }
        client.key_value_set(entry, json.dumps(about))
    about = json.loads(client.blocking_key_value_get(entry, _EXCHANGE_SECONDS * 1000))
    if listener is not None:
        bound = listener.getsockname()[0]
        host = "127.0.0.1" if ipaddress.ip_address(bound).is_unspecified else bound
    return StartedCompanion(
        identity,
        hub_address=(host, about["port"]),
        hub=Identity(**about["identity"]),
        listener=listener,
        key=bytes.fromhex(about["key"]),
        log=log,
        exit_code=LOST_PROCESS_EXIT_CODE,
    )


def log_file(identity: Identity, options: RunOptions) -> Path:
    """`DIR/logs/process_0003.log`; on this machine if DIR cannot take it, which is said."""
    name = f"process_{identity.process:04d}.log"
    directory = os.fspath(absolute(options.job_log_dir or "."))
    folder = Path(directory) / "logs"
    reason = "a store cannot append to files" if "://" in directory else None
    if reason is None:
        try:
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
    error: Exception,
    companion: StartedCompanion,
    wait_for_others: Callable[[], None] | None,
) -> NoReturn:
    """Says why this process ends, unless it is for want of another, whose companion says it."""
    if isinstance(error, jax.errors.JaxRuntimeError):
        # Its connections broke, perhaps, because another process was lost.
        time.sleep(_SECONDS_TO_LEARN)
    if isinstance(error, UsageError):
        print(f"runner: {error}", file=sys.stderr)
    else:
        traceback.print_exception(error)
    summary = str(error) if isinstance(error, UsageError) else f"{type(error).__name__}: {error}"
    companion.failed(" ".join(summary.split())[:1000])
    sys.stdout.flush()
    sys.stderr.flush()
    if wait_for_others is not None:
        wait_for_others()
    os._exit(error.exit_code if isinstance(error, UsageError) else 1)
