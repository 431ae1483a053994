"""Detection of the other processes of a job, by the variables of its launcher or by flags.

JAX itself finds the address of the coordinator in Slurm and Open MPI, and asks the clusters that
set no variables: TPU pods and Kubernetes.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

from layerkit_runner.errors import UsageError
from layerkit_runner.run_options import AUTO_ADDRESS, RunOptions

_SEPARATE_JOBS = "--num_processes=1 makes each process a separate job."
_FLAGS = "--coordinator_address=HOST:PORT, --num_processes=N and --process_id=I"
# Names of the variables with the numbers of processes, of this process, of it on its machine, and
# of those on its machine. `mpirun` inside a Slurm allocation starts its own processes.
_LAUNCHERS = {
    "Open MPI": tuple(f"OMPI_COMM_WORLD_{x}" for x in ("SIZE", "RANK", "LOCAL_RANK", "LOCAL_SIZE")),
    # srun sets these for its processes; the script that calls srun lacks the first.
    "Slurm": (
        "SLURM_STEP_NUM_TASKS",
        "SLURM_PROCID",
        "SLURM_LOCALID",
        "SLURM_STEP_TASKS_PER_NODE",
    ),
    "torchrun": ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
}


@dataclasses.dataclass(frozen=True)
class Launch:
    """The description of a process by its launcher; unknown values are None."""

    name: str
    num_processes: int
    process_id: int
    local_id: int | None = None
    num_local: int | None = None
    address: str | None = None


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


def find_launch(environ: Mapping[str, str]) -> Launch | None:
    """Return the launcher's description; None if no supported launcher started this process."""
    for name, variables in _LAUNCHERS.items():
        if name == "torchrun" and not {"MASTER_ADDR", "MASTER_PORT"} <= environ.keys():
            continue
        if set(variables[:2]) <= environ.keys():
            count, rank, local_rank, num_local = (_number(environ, x) for x in variables)
            address = _torchrun_address(environ) if name == "torchrun" else None
            return Launch(name, count or 0, rank or 0, local_rank, num_local, address)
    return None


def find_cluster(flags: RunOptions, environ: Mapping[str, str]) -> ClusterInfo | None:
    """Return the coordinator and number of this process; None if it is the only one of its job.

    Flags must not contradict a launcher that started several processes. One that started a single
    process contradicts nothing: that process may start others.
    """
    if flags.num_processes == 1:
        return None
    launch = find_launch(environ)
    address = None if flags.coordinator_address == AUTO_ADDRESS else flags.coordinator_address
    if launch is not None and launch.num_processes > 1:
        _check_flags(flags, launch)
        address = address or launch.address
        if address is None and launch.name == "Open MPI" and "OMPI_MCA_orte_hnp_uri" not in environ:
            raise UsageError(
                f"{launch.name} started {launch.num_processes} processes without an address",
                field="--coordinator_address",
                value=None,
                expected="HOST:PORT, with the host of the first process",
                hint=_SEPARATE_JOBS,
            )
        local_ids = local_device_ids(launch, environ)
        return ClusterInfo(address, launch.num_processes, launch.process_id, local_ids, launch.name)
    numbers = {"num_processes": flags.num_processes, "process_id": flags.process_id}
    missing = [name for name, value in numbers.items() if value is None]
    if address is None and flags.coordinator_address is None and len(missing) < 2:
        missing = ["coordinator_address"]
    elif address is None:
        missing = []
    if missing:
        raise UsageError(
            "cannot find the other processes", field=f"--{missing[0]}", value=None, expected=_FLAGS
        )
    if address is not None:
        return ClusterInfo(address, flags.num_processes, flags.process_id, None, "the flags")
    if launch is not None and flags.num_processes is None:
        return None
    try:
        name = _detect(environ, is_required=flags.coordinator_address is not None)
    except UsageError:
        raise
    except Exception as error:  # such as a missing permission in Kubernetes
        problem = f"cannot ask the cluster for the other processes: {error}"
        raise UsageError(problem, hint=_SEPARATE_JOBS) from error
    if name is None:
        return None
    return ClusterInfo(None, flags.num_processes, flags.process_id, None, name)


def local_device_ids(launch: Launch, environ: Mapping[str, str]) -> list[int] | None:
    """Return the GPUs of this process: an empty list for all visible ones, None for JAX's choice.

    JAX's choice, the GPU of the local number, is wrong if the launcher assigned GPUs or some idle.
    """
    if launch.local_id is None or "JAX_LOCAL_DEVICE_IDS" in environ:
        return None
    if launch.num_local == 1:
        return []
    visible = environ.get("CUDA_VISIBLE_DEVICES", environ.get("ROCR_VISIBLE_DEVICES"))
    if not visible or launch.num_local is None:
        return [launch.local_id]
    count, rest = divmod(len(visible.split(",")), launch.num_local)
    if count == 0 or rest != 0:
        return []  # fewer GPUs than processes: the launcher assigned them
    return [launch.local_id * count + offset for offset in range(count)]


def _check_flags(flags: RunOptions, launch: Launch) -> None:
    for flag, value, expected, variable in zip(
        ("num_processes", "process_id"),
        (flags.num_processes, flags.process_id),
        (launch.num_processes, launch.process_id),
        _LAUNCHERS[launch.name],
        strict=False,
    ):
        if value is not None and value != expected:
            raise UsageError(
                field=f"--{flag}",
                value=value,
                expected=f"{expected}, from {variable} of {launch.name}",
                hint=f"The flag can be omitted. {_SEPARATE_JOBS}",
            )


def _detect(environ: Mapping[str, str], *, is_required: bool) -> str | None:
    """Return the name of a TPU pod or an indexed Kubernetes job of several processes, else None."""
    # Not public, but the public `initialize` does not return the number of processes.
    from jax._src import clusters

    for cluster in (clusters.GkeTpuCluster, clusters.GceTpuCluster):
        if cluster.is_env_present():
            return "the TPU pod" if cluster.get_process_count() > 1 else None
    # A pod outside of an indexed job, such as a notebook, is alone.
    if "JOB_COMPLETION_INDEX" in environ and clusters.K8sCluster.is_env_present():
        return "Kubernetes" if clusters.K8sCluster.get_process_count() > 1 else None
    if is_required or {"JOB_COMPLETION_INDEX", "KUBERNETES_SERVICE_HOST"} <= environ.keys():
        raise UsageError(
            "cannot find the other processes",
            field="--coordinator_address",
            value=AUTO_ADDRESS if is_required else None,
            expected="a process of Slurm (inside srun), Open MPI, torchrun, a TPU pod or an indexed"
            f" Kubernetes job (with pip install 'jax[k8s]'), or {_FLAGS}",
            hint=_SEPARATE_JOBS,
        )
    return None


def _torchrun_address(environ: Mapping[str, str]) -> str:
    # Torchrun itself listens on its port; other launchers that set its variables do not.
    port = (_number(environ, "MASTER_PORT") or 0) + ("TORCHELASTIC_RUN_ID" in environ)
    return f"{environ['MASTER_ADDR']}:{environ.get('JAX_COORDINATOR_PORT', port)}"


def _number(environ: Mapping[str, str], name: str) -> int | None:
    """Return the number in a variable; in Slurm's `4(x2)`, four on each of two machines, the 4."""
    text = environ.get(name)
    if text is None or "," in text:  # Slurm's list for unequal machines
        return None
    match = re.fullmatch(r"(\d+)(\(x\d+\))?", text)
    if match is None:
        raise UsageError(owner="environment variable", field=name, value=text, expected="a number")
    return int(match[1])
