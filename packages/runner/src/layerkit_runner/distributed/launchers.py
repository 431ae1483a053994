"""Environment variables of a process: those of its launcher, and XLA's flags.

JAX itself finds the address of the coordinator, and asks the clusters that set no variables: TPU
pods and Kubernetes.

XLA ends the process for a flag that it does not know. The flags in the table of this module are
missing in every supported version. Sources: openxla/xla, pull requests 11422 and 30187, commits
d7a758b and 896e241; jax-ml/jax, pull request 25444.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from layerkit_runner.errors import UsageError
from layerkit_runner.run_options import AUTO_ADDRESS, RunOptions

SEPARATE_JOBS = "--num_processes=1 makes each process a separate job."


@dataclasses.dataclass(frozen=True)
class Launch:
    """The description of a process by its launcher; unknown values are None.

    `name` includes the job, such as `Slurm (job 4711)`. The two variables hold the numbers above
    them. `jax_knows` tells whether JAX finds the address of the coordinator by itself.
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
    """Return the launcher's description; None if no supported launcher started this process."""
    # `mpirun` inside a Slurm allocation starts its own processes.
    return _open_mpi(environ) or _slurm(environ) or _torchrun(environ)


def check_processes(flags: RunOptions, environ: Mapping[str, str]) -> None:
    """Raise `UsageError` if flags contradict the launcher, or are missing to find the processes.

    A launcher that started one process contradicts nothing: that process may start others.
    """
    launch = find_launch(environ)
    address = flags.coordinator_address
    is_auto = address in (None, AUTO_ADDRESS)
    if flags.num_processes == 1 or launch is None or launch.num_processes == 1:
        numbers = {"num_processes": flags.num_processes, "process_id": flags.process_id}
        if tuple(numbers.values()) in ((1, None), (1, 0)):
            return
        needs_address = address is None and set(numbers.values()) != {None}
        missing = [name for name, value in numbers.items() if value is None and not is_auto]
        if needs_address or missing:
            raise UsageError(
                "cannot find the other processes",
                field="--coordinator_address" if needs_address else f"--{missing[0]}",
                value=None,
                expected="--coordinator_address=HOST:PORT, --num_processes=N and --process_id=I",
                hint=f"The launcher is {launch.name}, which started one process."
                if launch
                else "No launcher was found. On a cluster that JAX supports,"
                " --coordinator_address=auto finds the processes.",
            )
        return
    for flag, value, expected, variable in (
        ("num_processes", flags.num_processes, launch.num_processes, launch.count_variable),
        ("process_id", flags.process_id, launch.process_id, launch.id_variable),
    ):
        if value is not None and value != expected:
            raise UsageError(
                field=f"--{flag}",
                value=value,
                expected=f"{expected}, from {variable} of {launch.name}",
                hint=f"The flag can be omitted. {SEPARATE_JOBS}",
            )
    if is_auto and launch.address is None and not launch.jax_knows:
        raise UsageError(
            f"{launch.name} started {launch.num_processes} processes without an address",
            field="--coordinator_address",
            value=address,
            expected="HOST:PORT, with the host of the first process",
            hint=SEPARATE_JOBS,
        )


def check_alone(mode: str, environ: Mapping[str, str]) -> None:
    """Raise `UsageError` if a launcher started several processes for a mode of a single process."""
    launch = find_launch(environ)
    if launch is not None and launch.num_processes > 1:
        raise UsageError(
            field="--mode",
            value=mode,
            expected=f"one process; {launch.name} started {launch.num_processes}",
        )


def local_device_ids(launch: Launch | None, environ: Mapping[str, str]) -> list[int] | None:
    """Return the GPUs of this process: an empty list for all visible ones, None for JAX's choice.

    JAX's choice, the GPU of the local number, is wrong if the launcher assigned GPUs or some idle.
    """
    if launch is None or launch.num_local is None or "JAX_LOCAL_DEVICE_IDS" in environ:
        return None
    if launch.num_local == 1:
        return []
    visible = environ.get("CUDA_VISIBLE_DEVICES", environ.get("ROCR_VISIBLE_DEVICES"))
    if not visible or launch.local_id is None:
        return None if launch.jax_knows or launch.local_id is None else [launch.local_id]
    count, rest = divmod(len(visible.split(",")), launch.num_local)
    if count == 0 or rest != 0:
        return []  # fewer GPUs than processes: the launcher assigned them
    return [launch.local_id * count + offset for offset in range(count)]


def _open_mpi(environ: Mapping[str, str]) -> Launch | None:
    names = [f"OMPI_COMM_WORLD_{name}" for name in ("SIZE", "RANK", "LOCAL_RANK", "LOCAL_SIZE")]
    if not set(names[:2]) <= environ.keys():
        return None
    # JAX reads the address from a variable that releases from 5 on do not set.
    jax_knows = "OMPI_MCA_orte_hnp_uri" in environ
    return _launch("Open MPI", environ, *names, jax_knows=jax_knows)


def _slurm(environ: Mapping[str, str]) -> Launch | None:
    # srun sets SLURM_STEP_NODELIST for its processes; the script that calls srun lacks it.
    needed = {"SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID"}
    if not needed <= environ.keys():
        return None
    # In an interactive shell, SLURM_NTASKS is the number of processes that may be started there.
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
    numbers = [_number(environ, name) for name in (count, rank, local_rank, local_count)]
    return Launch(
        name, numbers[0] or 0, numbers[1] or 0, count, rank, numbers[2], numbers[3], **fields
    )


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name)
    if text is not None and not text.isdecimal():
        raise UsageError(owner="environment variable", field=name, value=text, expected="a number")
    return None if text is None else int(text)


_ASYNC_FLAGS = "asynchronous by default; --xla_gpu_disable_async_collectives=NAMES turns it off"
_GRAPH_FLAGS = (
    "--xla_gpu_enable_command_buffer=NAMES; an empty list, or level 0 before, means no graphs"
)

SUCCESSORS: Mapping[str, str] = {
    "xla_gpu_enable_async_collectives": _ASYNC_FLAGS,
    "xla_gpu_enable_async_all_gather": _ASYNC_FLAGS,
    "xla_gpu_enable_async_all_reduce": _ASYNC_FLAGS,
    "xla_gpu_enable_async_all_to_all": _ASYNC_FLAGS,
    "xla_gpu_enable_async_collective_permute": _ASYNC_FLAGS,
    "xla_gpu_enable_async_reduce_scatter": _ASYNC_FLAGS,
    "xla_gpu_cuda_graph_level": _GRAPH_FLAGS,
    "xla_gpu_enable_cuda_graphs": _GRAPH_FLAGS,
    "xla_gpu_graph_level": _GRAPH_FLAGS,
    "xla_gpu_simplify_all_fp_conversions": "--xla_allow_excess_precision, which is on by default",
    "xla_gpu_enable_triton_softmax_fusion": "on by default, without a flag",
    "xla_gpu_enable_xla_runtime_executable": "no successor; the runtime no longer exists",
}
"""What replaces each removed flag, by its name."""


def check_removed_flags(environment: Mapping[str, str]) -> None:
    """Raise `UsageError` if XLA_FLAGS holds removed flags; each is named with its successor."""
    # Each group of flags with the same answer is one sentence.
    removed: dict[str, list[str]] = {}
    for word in environment.get("XLA_FLAGS", "").split():
        name = word.lstrip("-").partition("=")[0]
        if name in SUCCESSORS:
            removed.setdefault(SUCCESSORS[name], []).append(word)
    if removed:
        raise UsageError(
            "XLA no longer has these flags and would end the process",
            field="XLA_FLAGS",
            value=" ".join(word for group in removed.values() for word in group),
            expected="flags of the installed XLA",
            hint="; ".join(f"{', '.join(group)}: {answer}" for answer, group in removed.items()),
        )
