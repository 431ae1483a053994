"""Environment variables of launchers, flags that contradict them, and removed XLA flags."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from layerkit_runner.distributed.cluster import ClusterInfo, find_cluster
from layerkit_runner.distributed.launchers import (
    SUCCESSORS,
    check_alone,
    check_processes,
    check_removed_flags,
    find_launch,
    local_device_ids,
)
from layerkit_runner.errors import UsageError
from layerkit_runner.run_options import RunOptions

# As srun sets them in the fifth of six tasks, on the second of two machines.
SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_NODELIST": "node[001-002]",
    "SLURM_NTASKS": "6",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_STEP_TASKS_PER_NODE": "4,2",
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
}
# As mpirun of Open MPI 4 sets them.
OPEN_MPI = {
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
OPEN_MPI_5 = {name: value for name, value in OPEN_MPI.items() if "MCA" not in name}
ONE_TASK = {**SLURM, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "MASTER_ADDR": "node001",
    "MASTER_PORT": "29500",
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
}
OTHER = {name: value for name, value in TORCHRUN.items() if not name.startswith(("TORCH", "LOCAL"))}
# Options of the command line.
HOST = {"coordinator_address": "host:1"}
SECOND_OF_TWO = {**HOST, "num_processes": 2, "process_id": 1}


@pytest.mark.parametrize(
    ("environ", "name", "place", "address"),
    [
        (SLURM, "Slurm (job 4711)", (4, 6, 0, 2), None),
        (OPEN_MPI, "Open MPI", (3, 4, 1, 2), None),
        # mpirun inside a Slurm job: each of Slurm's tasks is a daemon of Open MPI.
        ({**SLURM, **OPEN_MPI}, "Open MPI", (3, 4, 1, 2), None),
        (TORCHRUN, "torchrun", (3, 4, 1, 2), "node001:29501"),
        ({**TORCHRUN, "JAX_COORDINATOR_PORT": "8476"}, "torchrun", (3, 4, 1, 2), "node001:8476"),
        (OTHER, "the launcher", (3, 4, None, None), "node001:29500"),
    ],
)
def test_find_launch_reads_the_variables_of_each_launcher(environ, name, place, address):
    launch = find_launch(environ)
    assert launch is not None
    assert launch.name == name
    found = (launch.process_id, launch.num_processes, launch.local_id, launch.num_local)
    assert (found, launch.address) == (place, address)


def test_find_launch_returns_none_without_all_variables_of_a_launcher():
    assert find_launch({}) is None
    # The script of sbatch, which srun has not started.
    assert find_launch({"SLURM_JOB_ID": "4711", "SLURM_NTASKS": "6", "SLURM_PROCID": "0"}) is None
    # Other programs may set RANK alone.
    assert find_launch({"RANK": "1", "WORLD_SIZE": "2"}) is None


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        # One process for all GPUs of its machine, in place of JAX's choice.
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}, []),
        (SLURM, None),
        # The launcher assigned one GPU to each process, or all processes see all GPUs.
        ({**OPEN_MPI, "CUDA_VISIBLE_DEVICES": "0,1"}, [1]),
        ({**OPEN_MPI, "CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}, [4, 5, 6, 7]),
        ({**OPEN_MPI, "CUDA_VISIBLE_DEVICES": "0,1,2"}, []),
        (TORCHRUN, [1]),
        (OTHER, None),
    ],
)
def test_local_device_ids_divide_the_visible_gpus(environ, expected):
    assert local_device_ids(find_launch(environ), environ) == expected


def test_tasks_per_node_are_parsed_from_slurms_notation():
    environ = {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "4(x2),3,1"}
    launches = [find_launch({**environ, "SLURM_NODEID": node}) for node in "0123"]
    assert [launch.num_local for launch in launches if launch] == [4, 4, 3, 1]


@pytest.mark.parametrize(
    ("environ", "options", "field", "value"),
    [
        (SLURM, {"num_processes": 4}, "--num_processes", 4),
        (OPEN_MPI, {**HOST, "num_processes": 4, "process_id": 0}, "--process_id", 0),
        (OPEN_MPI_5, {}, "--coordinator_address", None),
        ({}, {"num_processes": 2}, "--coordinator_address", None),
        ({}, {"process_id": 0}, "--coordinator_address", None),
        ({}, {**HOST, "num_processes": 2}, "--process_id", None),
        (ONE_TASK, HOST, "--num_processes", None),
        ({**SLURM, "SLURM_PROCID": "x"}, {}, "SLURM_PROCID", "x"),
    ],
)
def test_check_processes_names_the_contradicting_or_missing_flag(
    raises, environ, options, field, value
):
    with raises(UsageError, field=field, value=value):
        check_processes(RunOptions(**options), environ)


@pytest.mark.parametrize(
    ("environ", "options", "cluster"),
    [
        ({}, {}, None),
        (ONE_TASK, {}, None),  # as in a shell inside an allocation
        (SLURM, {"num_processes": 1}, None),
        (SLURM, {}, ClusterInfo(None, 6, 4, None, "Slurm (job 4711)")),
        (SLURM, {"coordinator_address": "auto"}, ClusterInfo(None, 6, 4, None, "Slurm (job 4711)")),
        (
            SLURM,
            {**HOST, "num_processes": 6, "process_id": 4},
            ClusterInfo("host:1", 6, 4, None, "Slurm (job 4711)"),
        ),
        (OPEN_MPI_5, HOST, ClusterInfo("host:1", 4, 3, [1], "Open MPI")),
        (TORCHRUN, {}, ClusterInfo("node001:29501", 4, 3, [1], "torchrun")),
        ({}, SECOND_OF_TWO, ClusterInfo("host:1", 2, 1, None, "the flags")),
        # One task of Slurm may start the processes of a job itself.
        (ONE_TASK, SECOND_OF_TWO, ClusterInfo("host:1", 2, 1, None, "the flags")),
        # A pod of Kubernetes that is no indexed job, such as a notebook.
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, {}, None),
    ],
)
def test_find_cluster_combines_launcher_and_flags(environ, options, cluster):
    assert find_cluster(RunOptions(**options), environ) == cluster


def test_export_by_several_processes_raises(raises):
    with raises(UsageError, field="--mode", value="export"):
        check_alone("export", SLURM)
    check_alone("export", ONE_TASK)


# The flags of NVIDIA's Pax page, of which XLA has removed the second and the third.
PUBLISHED = (
    "--xla_gpu_enable_latency_hiding_scheduler=true --xla_gpu_enable_async_all_gather=true"
    " --xla_gpu_enable_async_reduce_scatter=true --xla_gpu_enable_triton_gemm=false"
)


def test_flags_of_the_published_page_are_named_with_their_successor(raises):
    removed = "--xla_gpu_enable_async_all_gather=true --xla_gpu_enable_async_reduce_scatter=true"
    with raises(UsageError, field="XLA_FLAGS", value=removed) as caught:
        check_removed_flags({"XLA_FLAGS": PUBLISHED})
    assert "--xla_gpu_disable_async_collectives" in str(caught.value)
    kept = " ".join(flag for flag in PUBLISHED.split() if "async" not in flag)
    check_removed_flags({"XLA_FLAGS": kept})
    check_removed_flags({})


@pytest.mark.parametrize("name", ["xla_gpu_enable_async_all_gather", "xla_gpu_graph_level"])
def test_command_line_names_a_removed_flag_before_jax_is_imported(name: str):
    code = (
        "import sys; from layerkit_runner.cli import main;"
        " code = main(['--exp=lm.quickstart.LocalText', '--job_log_dir=unused']);"
        " print('jax' in sys.modules); sys.exit(code)"
    )
    environment = {**os.environ, "XLA_FLAGS": f"--{name}=0"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "False\n")
    assert f"--{name}=0" in done.stderr


def test_installed_xla_lacks_every_flag_of_the_table():
    """XLA names the flags that it does not know when it ends the process."""
    flags = {f"--{name}=true" for name in SUCCESSORS}
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(sorted(flags))}
    command = [sys.executable, "-c", "import jax; jax.devices()"]
    failed = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    (line,) = (line for line in failed.stderr.splitlines() if "Unknown flags in XLA_FLAGS" in line)
    assert flags <= set(line.split())
