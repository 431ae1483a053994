"""What Slurm, Open MPI or torchrun told a process about its job, in environment variables.

A mistake is reported before JAX is imported. JAX itself (`jax.distributed`) finds the address where
the processes meet, and asks the clusters that set no variables: TPU pods and Kubernetes.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from layerkit_runner.errors import UsageError
from layerkit_runner.run_options import AUTO_ADDRESS, RunOptions

_ALONE = "(--num_processes=1 makes every process a job of its own.)"


@dataclasses.dataclass(frozen=True)
class Launch:
    """A process as its launcher describes it.

    Attributes:
      name: The launcher and its job, such as `Slurm (job 4711)`.
      num_processes: Number of processes that were started together.
      process_id: Number of this process.
      count_variable: Environment variable that holds `num_processes`.
      id_variable: Environment variable that holds `process_id`.
      local_id: Number of this process among those on its machine; None if unknown.
      num_local: Number of processes on its machine; None if unknown.
      address: `host:port` where the processes meet; None if JAX has to find it.
      jax_knows: Whether JAX finds the address by itself.
    """

    name: str
    num_processes: int
    process_id: int
    count_variable: str
    id_variable: str
    local_id: int | None = None
    num_local: int | None = None
    address: str | None = None
    jax_knows: bool = True


def find_launch(environ: Mapping[str, str]) -> Launch | None:
    """Return what the launcher said; None if no supported launcher started this process.

    Open MPI comes first, since `mpirun` inside a Slurm allocation starts its own processes.

    Raises:
      UsageError: A variable is not a number.
    """
    return _open_mpi(environ) or _slurm(environ) or _torchrun(environ)


def check_processes(flags: RunOptions, environ: Mapping[str, str]) -> None:
    """Compare the flags about processes with what the launcher said.

    A launcher that started one process contradicts nothing: that process may start others.

    Raises:
      UsageError: They contradict each other, or do not suffice to find the other processes.
    """
    launch = find_launch(environ)
    if flags.num_processes == 1 or launch is None or launch.num_processes == 1:
        _check_complete(flags, launch)
        return
    for flag, given, said, variable in (
        ("num_processes", flags.num_processes, launch.num_processes, launch.count_variable),
        ("process_id", flags.process_id, launch.process_id, launch.id_variable),
    ):
        if given is not None and given != said:
            raise UsageError(
                f"--{flag}={given}, but {launch.name} says {variable}={said}. Leave the flag out:"
                f" it is found out. {_ALONE}"
            )
    is_auto = flags.coordinator_address in (None, AUTO_ADDRESS)
    if is_auto and launch.address is None and not launch.jax_knows:
        raise UsageError(
            f"{launch.name} started {launch.num_processes} processes, but this release of it does"
            " not say where they can meet: add --coordinator_address=HOST:PORT, with the host of"
            f" the first process. {_ALONE}"
        )


def check_alone(mode: str, environ: Mapping[str, str]) -> None:
    """Raise an error if a launcher started several processes for the work of a single one.

    Raises:
      UsageError: It did; all would write the same files.
    """
    launch = find_launch(environ)
    if launch is not None and launch.num_processes > 1:
        raise UsageError(
            f"--mode={mode} is the work of one process, but {launch.name} started"
            f" {launch.num_processes}; start it once."
        )


def _check_complete(flags: RunOptions, launch: Launch | None) -> None:
    """Raise an error if flags alone have to describe the job, and one of them is missing."""
    address, given = flags.coordinator_address, (flags.num_processes, flags.process_id)
    if given in ((1, None), (1, 0)):
        return
    if address in (None, AUTO_ADDRESS):
        if given != (None, None) and address is None:
            raise UsageError(
                "the processes of a job need --coordinator_address=HOST:PORT, --num_processes=N and"
                " --process_id=I, or --coordinator_address=auto on a cluster that JAX knows."
            )
    elif None in given:
        missing = "--num_processes=N" if given[0] is None else "--process_id=I"
        found = f"{launch.name} started one process" if launch else "no launcher was found"
        raise UsageError(
            f"--coordinator_address={address} needs --num_processes=N and --process_id=I: {missing}"
            f" is missing, and {found}."
        )


def local_device_ids(launch: Launch | None, environ: Mapping[str, str]) -> list[int] | None:
    """Return the GPUs of this process: an empty list for all that it sees, None for JAX's choice.

    JAX gives each process of a launcher the one GPU of its local number. That is wrong if the
    launcher assigned GPUs already, and leaves GPUs idle if there are fewer processes.
    """
    if launch is None or launch.num_local is None or "JAX_LOCAL_DEVICE_IDS" in environ:
        return None
    if launch.num_local == 1:
        return []
    visible = environ.get("CUDA_VISIBLE_DEVICES", environ.get("ROCR_VISIBLE_DEVICES"))
    if not visible or launch.local_id is None:
        return None if launch.jax_knows or launch.local_id is None else [launch.local_id]
    each, rest = divmod(len(visible.split(",")), launch.num_local)
    if each == 0 or rest != 0:
        return []  # fewer than processes: every process was given its own
    return [launch.local_id * each + offset for offset in range(each)]


def _open_mpi(environ: Mapping[str, str]) -> Launch | None:
    # JAX reads the address from a variable that releases from 5 on do not set.
    jax_knows = "OMPI_MCA_orte_hnp_uri" in environ
    count, rank = "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"
    local = ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
    if not {count, rank} <= environ.keys():
        return None
    return _launch("Open MPI", environ, count, rank, *local, jax_knows=jax_knows)


def _slurm(environ: Mapping[str, str]) -> Launch | None:
    # SLURM_STEP_NODELIST is set for what srun starts, not for the script that calls srun.
    needed = {"SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID"}
    if not needed <= environ.keys():
        return None
    # In a shell that Slurm opened on a node, SLURM_NTASKS is the number that may be started there.
    count = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    name = f"Slurm (job {environ['SLURM_JOB_ID']})"
    launch = _launch(name, environ, count, "SLURM_PROCID", "SLURM_LOCALID")
    return dataclasses.replace(launch, num_local=_tasks_on_this_node(environ))


def _tasks_on_this_node(environ: Mapping[str, str]) -> int | None:
    """Parse `4(x2),3`: four tasks on each of the first two nodes, three on the next."""
    text = environ.get("SLURM_STEP_TASKS_PER_NODE", environ.get("SLURM_TASKS_PER_NODE"))
    node = _number(environ, "SLURM_NODEID")
    if text is None or node is None:
        return None
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            return None
        counts += [int(match[1])] * int(match[2] or 1)
    return counts[node] if node < len(counts) else None


def _torchrun(environ: Mapping[str, str]) -> Launch | None:
    """Read torchrun's variables, which other launchers of machine learning jobs set as well."""
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= environ.keys():
        return None
    is_torchrun = "TORCHELASTIC_RUN_ID" in environ
    # Torchrun itself listens on its port.
    port = environ.get("JAX_COORDINATOR_PORT", (_number(environ, "MASTER_PORT") or 0) + is_torchrun)
    return _launch(
        "torchrun" if is_torchrun else "the launcher",
        environ,
        *("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
        address=f"{environ['MASTER_ADDR']}:{port}",
        jax_knows=False,
    )


def _launch(
    name: str,
    environ: Mapping[str, str],
    count: str,
    rank: str,
    local_rank: str,
    local_count: str = "",
    **fields: Any,
) -> Launch:
    return Launch(
        name,
        num_processes=int(_number(environ, count) or 0),
        process_id=int(_number(environ, rank) or 0),
        count_variable=count,
        id_variable=rank,
        local_id=_number(environ, local_rank),
        num_local=_number(environ, local_count),
        **fields,
    )


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name)
    if text is not None and not text.isdecimal():
        raise UsageError(f"the environment says {name}={text!r}; expected a number.")
    return None if text is None else int(text)
