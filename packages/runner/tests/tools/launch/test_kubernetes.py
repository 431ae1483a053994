"""The manifest, read back."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from layerkit_runner.errors import UsageError
from layerkit_runner.tools.launch import kubernetes

STORE = "gs://bucket/run"


def jobset(request_of, flags_of, folder: str, *flags: str, mesh=None) -> dict[str, Any]:
    flags = flags_of("kubernetes", "--image=ours:1", *flags)
    recipe = kubernetes.make_recipe(request_of(folder, mesh=mesh), flags)
    ((path, text),) = recipe.files.items()
    assert recipe.commands[-1] == ["kubectl", "apply", f"--filename={path}"]
    return yaml.safe_load(text)


def test_four_machines_with_gpus(request_of, flags_of, check_bash):
    found = jobset(
        request_of,
        flags_of,
        "/data/it's here",
        *("--nodes=4", "--gpus_per_node=8", "--volume=claim:/data/", "--namespace=ours"),
        *("--env=NCCL_DEBUG=INFO", "--setup=ulimit -l unlimited", "--service_account=trainer"),
        mesh=(8, 4),
    )
    assert (found["kind"], found["metadata"]) == (
        "JobSet",
        {"name": "myexperiment", "namespace": "ours"},
    )
    assert found["spec"]["failurePolicy"]["maxRestarts"] == 10
    (job,) = found["spec"]["replicatedJobs"]
    assert (job["name"], job["replicas"]) == ("run", 1)
    spec = job["template"]["spec"]
    assert spec["parallelism"] == spec["completions"] == 4
    assert (spec["completionMode"], spec["backoffLimit"]) == ("Indexed", 0)
    pod = spec["template"]["spec"]
    assert (pod["restartPolicy"], pod["serviceAccountName"]) == ("Never", "trainer")
    assert pod["terminationGracePeriodSeconds"] == 300
    (container,) = pod["containers"]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 8}}
    assert container["env"] == [
        {"name": "PYTHONUNBUFFERED", "value": "1"},
        {"name": "NCCL_DEBUG", "value": "INFO"},
    ]
    volumes = {volume["name"] for volume in pod["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    bash, _, command = container["command"]
    check_bash(command)
    assert bash == "bash"
    first, run = command.splitlines()
    assert first == "ulimit -l unlimited"
    assert run.startswith("exec runner --exp=lm.some.MyExperiment ")
    assert "--coordinator_address=myexperiment-run-0-0.myexperiment:8476 --num_processes=4" in run
    assert run.endswith('--process_id="$JOB_COMPLETION_INDEX"')
    assert "--xla_flags_preset=gpu_latency_hiding" in run


def test_another_name(request_of, flags_of):
    found = jobset(request_of, flags_of, STORE, "--name=second-try", "--nodes=2")
    assert found["metadata"]["name"] == "second-try"
    (job,) = found["spec"]["replicatedJobs"]
    command = job["template"]["spec"]["template"]["spec"]["containers"][0]["command"][2]
    assert "--coordinator_address=second-try-run-0-0.second-try:8476" in command


@pytest.mark.parametrize(("folder", "flags"), [(STORE, []), ("/data/run", ["--volume=a:/data"])])
def test_each_set_has_a_manifest_of_its_own_beside_the_command(request_of, flags_of, folder, flags):
    for more, path in (
        ([], "myexperiment.jobset.yaml"),
        (["--name=other"], "other.jobset.yaml"),
        (["--script=it.yaml"], "it.yaml"),
    ):
        options = flags_of("kubernetes", "--image=ours:1", *flags, *more)
        recipe = kubernetes.make_recipe(request_of(folder), options)
        assert list(recipe.files) == [path]
        assert [*recipe.commands] == [["kubectl", "apply", f"--filename={path}"]]


def test_a_set_is_replaced_when_its_pods_are_gone(request_of, flags_of):
    flags = flags_of("kubernetes", "--image=ours:1", "--replace", "--namespace=ours")
    recipe = kubernetes.make_recipe(request_of(STORE), flags)
    delete = ["kubectl", "delete", "jobset", "myexperiment", "--namespace=ours"]
    assert [*recipe.commands] == [
        [*delete, "--ignore-not-found", "--cascade=foreground"],
        ["kubectl", "apply", "--filename=myexperiment.jobset.yaml"],
    ]
    assert recipe.afterwards[0].endswith(" ".join(recipe.commands[0]))
    assert "the same command with --replace" in recipe.afterwards[1]


@pytest.mark.parametrize("name", ["Run", "1st", "a_b", "end-", "a" * 41])
def test_a_name_that_no_set_can_have(raises, flags_of, name):
    with raises(UsageError, field="--name", value=name):
        flags_of("kubernetes", "--image=ours:1", f"--name={name}")


def test_an_error_or_a_wrong_command_ends_the_set(request_of, flags_of):
    spec = jobset(request_of, flags_of, STORE)["spec"]
    (rule,) = spec["failurePolicy"]["rules"]
    assert rule == {"action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    job = spec["replicatedJobs"][0]["template"]["spec"]
    (rule,) = job["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"] == {"operator": "In", "values": [1, 2, 65]}


def test_two_slices_of_tpus(request_of, flags_of):
    found = jobset(
        request_of,
        flags_of,
        STORE,
        *("--tpu=v4", "--tpu_topology=4x4x4", "--num_slices=2"),
        mesh=(64, 2),
    )
    assert found["metadata"]["annotations"] == {
        "alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"
    }
    (job,) = found["spec"]["replicatedJobs"]
    assert (job["replicas"], job["template"]["spec"]["parallelism"]) == (2, 16)
    pod = job["template"]["spec"]["template"]["spec"]
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v4-podslice",
        "cloud.google.com/gke-tpu-topology": "4x4x4",
    }
    (container,) = pod["containers"]
    assert container["resources"] == {"limits": {"google.com/tpu": 4}}
    # GKE tells the pods which they are.
    assert "coordinator_address" not in container["command"][2]
    assert "--xla_flags_preset=tpu_multislice" in container["command"][2]


@pytest.mark.parametrize(
    ("tpu", "topology", "pods", "chips"),
    [("v5e", "2x2", 1, 4), ("v6e", "2x4", 1, 8), ("v5e", "4x4", 4, 4), ("v5p", "2x2x1", 1, 4)],
)
def test_hosts_of_a_slice(request_of, flags_of, tpu, topology, pods, chips):
    flags = (f"--tpu={tpu}", f"--tpu_topology={topology}")
    job = jobset(request_of, flags_of, STORE, *flags)["spec"]["replicatedJobs"][0]
    spec = job["template"]["spec"]
    limits = spec["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert (spec["parallelism"], limits) == (pods, {"google.com/tpu": chips})


@pytest.mark.parametrize(
    ("folder", "flags", "message"),
    [
        ("/data/run", [], "be lost with it; give a store, such as gs://…, or --volume=CLAIM:PATH."),
        ("/data2/run", ["--volume=a:/data"], "=/data2/run is not in --volume, which is at /data."),
        (STORE, ["--tpu=v4"], "--tpu and --tpu_topology belong together"),
        (
            STORE,
            ["--tpu=v4", "--tpu_topology=4x4"],
            "topologies of v4 are written 4x4x8, not '4x4'",
        ),
        (STORE, ["--tpu=v2", "--tpu_topology=4x4"], "there is no TPU 'v2'"),
        (STORE, ["--num_slices=2"], "--num_slices is of TPUs; machines with GPUs are counted by"),
        (
            STORE,
            ["--tpu=v4", "--tpu_topology=4x4x4", "--nodes=2"],
            "--tpu says what the pods have; leave out --nodes and --gpus_per_node.",
        ),
        (
            STORE,
            ["--nodes=2"],
            "--nodes=2 without GPUs or TPUs make 2 device(s), and the mesh of lm.some.MyExperiment"
            " has 128; give --gpus_per_node, or set --fdl.partitioner.ici_mesh_shape and"
            " --fdl.partitioner.dcn_mesh_shape.",
        ),
        (STORE, ["--gpus_per_node=4"], "--nodes=1 --gpus_per_node=4 make 4 devices, and the mesh"),
    ],
)
def test_what_does_not_fit(request_of, flags_of, folder, flags, message):
    with pytest.raises(UsageError) as error:
        jobset(request_of, flags_of, folder, *flags, mesh=(64, 2))
    assert message in str(error.value)
