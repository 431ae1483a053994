"""Launchers: what Slurm, Open MPI or torchrun told a process about the job it was started for.

They say it in environment variables, so a mistake is answered before JAX is imported. Where the
processes meet is found out by JAX's own detection (`jax.distributed`), and so are clusters that
have to be asked: TPU pods and Kubernetes.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

from layerkit_runner.errors import UsageError
from layerkit_runner.run_options import AUTO_ADDRESS, RunOptions


@dataclasses.dataclass(frozen=True)
class Launch:
    """A process as its launcher sees it.

    Attributes:
      name: The launcher and its job, such as `Slurm (job 4711)`.
      num_processes: How many were started together.
      process_id: Which of them this is.
      count_variable: The environment variable that says `num_processes`.
      id_variable: The one that says `process_id`.
      local_id: Which this is among those on its machine; None if unknown.
      num_local: How many those are; None if unknown.
      address: `host:port` where they meet; None if that is left to JAX.
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
    """What the launcher said; None if no launcher that we know started this process.

    An `mpirun` inside a Slurm allocation is Open MPI's affair, so it is asked first.

    Raises:
      UsageError: one of its variables is no number.
    """
    for find in (_open_mpi, _slurm, _torchrun):
        launch = find(environ)
        if launch is not None:
            return launch
    return None


def check_processes(options: RunOptions, environ: Mapping[str, str]) -> None:
    """Compares the flags about processes with what the launcher said.

    A launcher that started one process contradicts nothing: the job may be put together otherwise.

    Raises:
      UsageError: they contradict each other, or do not suffice to find the other processes.
    """
    launch = find_launch(environ)
    if options.num_processes == 1 or launch is None or launch.num_processes == 1:
        _check_complete(options, launch)
        return
    for flag, given, said, variable in (
        ("num_processes", options.num_processes, launch.num_processes, launch.count_variable),
        ("process_id", options.process_id, launch.process_id, launch.id_variable),
    ):
        if given is not None and given != said:
            raise UsageError(
                f"--{flag}={given}, but {launch.name} says {variable}={said}. Leave the flag out:"
                " it is found out. (--num_processes=1 makes every process a job of its own.)"
            )
    if (
        launch.address is None
        and not launch.jax_knows
        and options.coordinator_address
        in (
            None,
            AUTO_ADDRESS,
        )
    ):
        raise UsageError(
            f"{launch.name} started {launch.num_processes} processes, but this release of it does"
            " not say where they can meet: add --coordinator_address=HOST:PORT, with the host of"
            " the first process. (--num_processes=1 makes every process a job of its own.)"
        )


def check_alone(mode: str, environ: Mapping[str, str]) -> None:
    """For what a single process does.

    Raises:
      UsageError: a launcher started several, which would all write the same.
    """
    launch = find_launch(environ)
    if launch is not None and launch.num_processes > 1:
        raise UsageError(
            f"--mode={mode} is the work of one process, but {launch.name} started"
            f" {launch.num_processes}; start it once."
        )


def _check_complete(options: RunOptions, launch: Launch | None) -> None:
    address = options.coordinator_address
    alone = options.num_processes == 1
    if alone and (options.process_id or 0) == 0:
        return
    given = (options.num_processes, options.process_id)
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
    """Which GPUs of its machine a process takes; an empty list for all that it sees.

    JAX gives each process of a launcher the one GPU of its local number. That is wrong where the
    launcher handed them out already, and leaves GPUs idle where there are fewer processes.

    Returns:
      None where JAX's choice stands.
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
    if "OMPI_COMM_WORLD_SIZE" not in environ or "OMPI_COMM_WORLD_RANK" not in environ:
        return None
    return Launch(
        "Open MPI",
        num_processes=_number(environ, "OMPI_COMM_WORLD_SIZE"),
        process_id=_number(environ, "OMPI_COMM_WORLD_RANK"),
        count_variable="OMPI_COMM_WORLD_SIZE",
        id_variable="OMPI_COMM_WORLD_RANK",
        local_id=_number_if_set(environ, "OMPI_COMM_WORLD_LOCAL_RANK"),
        num_local=_number_if_set(environ, "OMPI_COMM_WORLD_LOCAL_SIZE"),
        # What JAX reads the address from; releases from 5 on do not set it.
        jax_knows="OMPI_MCA_orte_hnp_uri" in environ,
    )


def _slurm(environ: Mapping[str, str]) -> Launch | None:
    # The nodes of a step are told to what srun starts, not to the script that calls srun.
    needed = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID")
    if not all(name in environ for name in needed):
        return None
    # In a shell that Slurm opened on a node, SLURM_NTASKS is the number that may be started there.
    count = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    return Launch(
        f"Slurm (job {environ['SLURM_JOB_ID']})",
        num_processes=_number(environ, count),
        process_id=_number(environ, "SLURM_PROCID"),
        count_variable=count,
        id_variable="SLURM_PROCID",
        local_id=_number_if_set(environ, "SLURM_LOCALID"),
        num_local=_tasks_on_this_node(environ),
    )


def _tasks_on_this_node(environ: Mapping[str, str]) -> int | None:
    """Reads `4(x2),3`: four on each of the first two nodes, three on the next."""
    text = environ.get("SLURM_STEP_TASKS_PER_NODE", environ.get("SLURM_TASKS_PER_NODE"))
    node = _number_if_set(environ, "SLURM_NODEID")
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
    """Torchrun's variables, which other launchers of machine learning jobs set as well."""
    needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if not all(name in environ for name in needed):
        return None
    # Torchrun itself listens on its port.
    port = _number(environ, "MASTER_PORT") + ("TORCHELASTIC_RUN_ID" in environ)
    return Launch(
        "torchrun" if "TORCHELASTIC_RUN_ID" in environ else "the launcher",
        num_processes=_number(environ, "WORLD_SIZE"),
        process_id=_number(environ, "RANK"),
        count_variable="WORLD_SIZE",
        id_variable="RANK",
        local_id=_number_if_set(environ, "LOCAL_RANK"),
        num_local=_number_if_set(environ, "LOCAL_WORLD_SIZE"),
        address=f"{environ['MASTER_ADDR']}:{environ.get('JAX_COORDINATOR_PORT', port)}",
        jax_knows=False,
    )


def _number(environ: Mapping[str, str], name: str) -> int:
    if not environ[name].isdecimal():
        raise UsageError(f"the environment says {name}={environ[name]!r}; expected a number.")
    return int(environ[name])


def _number_if_set(environ: Mapping[str, str], name: str) -> int | None:
    return _number(environ, name) if name in environ else None
