"""Environment variables of launchers, and flags that contradict them or are missing."""

from __future__ import annotations

import pytest

from layerkit_runner.distributed.launchers import (
    ClusterInfo,
    find_cluster,
    find_launch,
    local_device_ids,
)
from layerkit_runner.errors import UsageError
from layerkit_runner.run_options import RunOptions

# As srun sets them in the fifth of six tasks, on the second of two machines.
SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_STEP_TASKS_PER_NODE": "3(x2)",
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "1",
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
        (SLURM, "Slurm", (4, 6, 1, 3), None),
        (OPEN_MPI, "Open MPI", (3, 4, 1, 2), None),
        # mpirun inside a Slurm job: each of Slurm's tasks is a daemon of Open MPI.
        ({**SLURM, **OPEN_MPI}, "Open MPI", (3, 4, 1, 2), None),
        (TORCHRUN, "torchrun", (3, 4, 1, 2), "node001:29501"),
        ({**TORCHRUN, "JAX_COORDINATOR_PORT": "8476"}, "torchrun", (3, 4, 1, 2), "node001:8476"),
        (OTHER, "torchrun", (3, 4, None, None), "node001:29500"),
    ],
)
def test_find_launch_reads_the_variables_of_each_launcher(environ, name, place, address):
    launch = find_launch(environ)
    assert launch is not None
    assert launch.name == name
    result = (launch.process_id, launch.num_processes, launch.local_id, launch.num_local)
    assert (result, launch.address) == (place, address)


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
        (SLURM, [1]),
        # Slurm's list for unequal machines.
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "4,2"}, [1]),
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
def test_find_cluster_names_the_contradicting_or_missing_flag(
    raises, environ, options, field, value
):
    with raises(UsageError, field=field, value=value):
        find_cluster(RunOptions(**options), environ)


@pytest.mark.parametrize(
    ("environ", "options", "cluster"),
    [
        ({}, {}, None),
        (ONE_TASK, {}, None),  # as in a shell inside an allocation
        (SLURM, {"num_processes": 1}, None),
        (SLURM, {}, ClusterInfo(None, 6, 4, [1], "Slurm")),
        (SLURM, {"coordinator_address": "auto"}, ClusterInfo(None, 6, 4, [1], "Slurm")),
        (
            SLURM,
            {**HOST, "num_processes": 6, "process_id": 4},
            ClusterInfo("host:1", 6, 4, [1], "Slurm"),
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


def test_find_cluster_reports_a_cluster_that_does_not_answer(monkeypatch: pytest.MonkeyPatch):
    def fail() -> bool:
        raise RuntimeError("403 Forbidden")

    monkeypatch.setattr("jax._src.clusters.K8sCluster.is_env_present", fail)
    with pytest.raises(UsageError, match="other processes: 403 Forbidden"):
        find_cluster(RunOptions(), {"JOB_COMPLETION_INDEX": "0"})
