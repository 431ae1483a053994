"""What launchers say in the environment, and where the flags contradict it."""

from __future__ import annotations

import pytest

from layerkit_runner.config.flags import RunOptions
from layerkit_runner.distributed.cluster import ClusterInfo, find_cluster
from layerkit_runner.distributed.launchers import (
    check_alone,
    check_processes,
    find_launch,
    local_device_ids,
)
from layerkit_runner.errors import UsageError

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
# As mpirun of Open MPI 4 does.
OPEN_MPI = {
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
OPEN_MPI_5 = {name: value for name, value in OPEN_MPI.items() if "MCA" not in name}
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


@pytest.mark.parametrize(
    ("environ", "name", "place", "address"),
    [
        (SLURM, "Slurm (job 4711)", (4, 6, 0, 2), None),
        (OPEN_MPI, "Open MPI", (3, 4, 1, 2), None),
        # mpirun inside a Slurm job: of Slurm's tasks each is a daemon of Open MPI.
        ({**SLURM, **OPEN_MPI}, "Open MPI", (3, 4, 1, 2), None),
        (TORCHRUN, "torchrun", (3, 4, 1, 2), "node001:29501"),
        ({**TORCHRUN, "JAX_COORDINATOR_PORT": "8476"}, "torchrun", (3, 4, 1, 2), "node001:8476"),
        (OTHER, "the launcher", (3, 4, None, None), "node001:29500"),
    ],
)
def test_what_each_launcher_says(environ, name, place, address):
    launch = find_launch(environ)
    assert launch is not None
    assert launch.name == name
    found = (launch.process_id, launch.num_processes, launch.local_id, launch.num_local)
    assert (found, launch.address) == (place, address)


def test_where_nothing_was_launched():
    assert find_launch({}) is None
    # The script of sbatch, which srun has not started.
    assert find_launch({"SLURM_JOB_ID": "4711", "SLURM_NTASKS": "6", "SLURM_PROCID": "0"}) is None
    # RANK alone may be anyone's.
    assert find_launch({"RANK": "1", "WORLD_SIZE": "2"}) is None


def test_a_shell_inside_an_allocation_is_one_task():
    shell = {**SLURM, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}
    assert find_cluster(RunOptions(), shell) is None


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        # One process for all GPUs of its machine, whatever JAX would choose.
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}, []),
        (SLURM, None),
        # The launcher gave each process one already, or all see all.
        ({**OPEN_MPI, "CUDA_VISIBLE_DEVICES": "1"}, []),
        ({**OPEN_MPI, "CUDA_VISIBLE_DEVICES": "0,1"}, [1]),
        ({**OPEN_MPI, "CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}, [4, 5, 6, 7]),
        ({**OPEN_MPI, "CUDA_VISIBLE_DEVICES": "0,1,2"}, []),
        ({**OPEN_MPI, "ROCR_VISIBLE_DEVICES": "0,1"}, [1]),
        ({**OPEN_MPI, "CUDA_VISIBLE_DEVICES": "0,1", "JAX_LOCAL_DEVICE_IDS": "0"}, None),
        (TORCHRUN, [1]),
        (OTHER, None),
    ],
)
def test_gpus_of_a_process(environ, expected):
    assert local_device_ids(find_launch(environ), environ) == expected


def test_tasks_per_node_as_slurm_writes_them():
    counts = {
        node: find_launch(
            {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "4(x2),3,1", "SLURM_NODEID": str(node)}
        )
        for node in range(4)
    }
    assert [launch.num_local for launch in counts.values() if launch] == [4, 4, 3, 1]


ALONE = " (--num_processes=1 makes every process a job of its own.)"
NEED = (
    "the processes of a job need --coordinator_address=HOST:PORT, --num_processes=N and"
    " --process_id=I, or --coordinator_address=auto on a cluster that JAX knows."
)


@pytest.mark.parametrize(
    ("environ", "options", "text"),
    [
        (
            SLURM,
            {"num_processes": 4},
            "--num_processes=4, but Slurm (job 4711) says SLURM_STEP_NUM_TASKS=6. Leave the flag"
            f" out: it is found out.{ALONE}",
        ),
        (
            OPEN_MPI,
            {"coordinator_address": "host:1", "num_processes": 4, "process_id": 0},
            "--process_id=0, but Open MPI says OMPI_COMM_WORLD_RANK=3. Leave the flag out: it is"
            f" found out.{ALONE}",
        ),
        (
            OPEN_MPI_5,
            {},
            "Open MPI started 4 processes, but this release of it does not say where they can meet:"
            f" add --coordinator_address=HOST:PORT, with the host of the first process.{ALONE}",
        ),
        ({}, {"num_processes": 2}, NEED),
        ({}, {"num_processes": 2, "process_id": 0}, NEED),
        ({}, {"process_id": 0}, NEED),
        (
            {},
            {"coordinator_address": "host:1", "num_processes": 2},
            "--coordinator_address=host:1 needs --num_processes=N and --process_id=I:"
            " --process_id=I is missing, and no launcher was found.",
        ),
        (
            {**SLURM, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
            {"coordinator_address": "host:1"},
            "--coordinator_address=host:1 needs --num_processes=N and --process_id=I:"
            " --num_processes=N is missing, and Slurm (job 4711) started one process.",
        ),
        (
            {**SLURM, "SLURM_PROCID": "x"},
            {},
            "the environment says SLURM_PROCID='x'; expected a number.",
        ),
    ],
)
def test_contradictions_are_refused_by_name(environ, options, text):
    with pytest.raises(UsageError) as caught:
        check_processes(RunOptions(**options), environ)
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("environ", "options", "cluster"),
    [
        ({}, {}, None),
        (SLURM, {"num_processes": 1}, None),
        (SLURM, {}, ClusterInfo(None, 6, 4, None, "Slurm (job 4711)")),
        (SLURM, {"coordinator_address": "auto"}, ClusterInfo(None, 6, 4, None, "Slurm (job 4711)")),
        (
            SLURM,
            {"coordinator_address": "host:1", "num_processes": 6, "process_id": 4},
            ClusterInfo("host:1", 6, 4, None, "Slurm (job 4711)"),
        ),
        (
            OPEN_MPI_5,
            {"coordinator_address": "host:1"},
            ClusterInfo("host:1", 4, 3, [1], "Open MPI"),
        ),
        (TORCHRUN, {}, ClusterInfo("node001:29501", 4, 3, [1], "torchrun")),
        (
            {},
            {"coordinator_address": "host:1", "num_processes": 2, "process_id": 1},
            ClusterInfo("host:1", 2, 1, None, "the flags"),
        ),
        # One task of Slurm may well start the processes of a job itself.
        (
            {**SLURM, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
            {"coordinator_address": "host:1", "num_processes": 2, "process_id": 1},
            ClusterInfo("host:1", 2, 1, None, "the flags"),
        ),
        # A pod of Kubernetes that is no indexed job, such as a notebook.
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, {}, None),
    ],
)
def test_how_processes_meet(environ, options, cluster):
    assert find_cluster(RunOptions(**options), environ) == cluster


def test_auto_needs_a_cluster():
    with pytest.raises(UsageError, match="this is none of Slurm"):
        find_cluster(RunOptions(coordinator_address="auto"), {})


def test_an_indexed_kubernetes_job_is_never_taken_for_a_lone_process():
    pod = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "2"}
    with pytest.raises(UsageError, match="process 2 of an indexed Kubernetes job"):
        find_cluster(RunOptions(), pod)


def test_an_export_is_not_made_by_several_at_once():
    with pytest.raises(UsageError) as caught:
        check_alone("export", SLURM)
    assert str(caught.value) == (
        "--mode=export is the work of one process, but Slurm (job 4711) started 6; start it once."
    )
    check_alone("export", {**SLURM, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"})
