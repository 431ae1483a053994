"""The manifest of a JobSet."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from layerkit.errors import MISSING, UserError
from layerkit_runner.errors import UsageError
from layerkit_runner.tools.launch import kubernetes

STORE = "gs://bucket/run"


def jobset(request_of, flags_of, folder: str, *flags: str, mesh=None) -> dict[str, Any]:
    flags = flags_of("kubernetes", "--image=ours:1", *flags)
    recipe = kubernetes.make_recipe(request_of(folder, mesh=mesh), flags)
    ((path, text),) = recipe.files.items()
    assert recipe.commands[-1] == ["kubectl", "apply", f"--filename={path}"]
    return yaml.safe_load(text)


def test_manifest_of_four_machines_with_gpus(request_of, flags_of, check_bash):
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


def test_name_of_the_set_is_in_the_address_of_the_first_pod(request_of, flags_of):
    found = jobset(request_of, flags_of, STORE, "--name=second-try", "--nodes=2")
    assert found["metadata"]["name"] == "second-try"
    (job,) = found["spec"]["replicatedJobs"]
    command = job["template"]["spec"]["template"]["spec"]["containers"][0]["command"][2]
    assert "--coordinator_address=second-try-run-0-0.second-try:8476" in command


@pytest.mark.parametrize(("folder", "flags"), [(STORE, []), ("/data/run", ["--volume=a:/data"])])
def test_path_of_the_manifest(request_of, flags_of, folder, flags):
    for more, path in (
        ([], "myexperiment.jobset.yaml"),
        (["--name=other"], "other.jobset.yaml"),
        (["--script=it.yaml"], "it.yaml"),
    ):
        options = flags_of("kubernetes", "--image=ours:1", *flags, *more)
        recipe = kubernetes.make_recipe(request_of(folder), options)
        assert list(recipe.files) == [path]
        assert [*recipe.commands] == [["kubectl", "apply", f"--filename={path}"]]


def test_replace_deletes_the_set_and_waits_for_its_pods(request_of, flags_of):
    flags = flags_of("kubernetes", "--image=ours:1", "--replace", "--namespace=ours")
    recipe = kubernetes.make_recipe(request_of(STORE), flags)
    delete = ["kubectl", "delete", "jobset", "myexperiment", "--namespace=ours"]
    assert [*recipe.commands] == [
        [*delete, "--ignore-not-found", "--cascade=foreground"],
        ["kubectl", "apply", "--filename=myexperiment.jobset.yaml"],
    ]
    assert recipe.next_steps[0].endswith(" ".join(recipe.commands[0]))
    assert "the same command with --replace" in recipe.next_steps[1]


@pytest.mark.parametrize("name", ["Run", "1st", "a_b", "end-", "a" * 41])
def test_wrong_name_of_a_set_is_an_error(raises, flags_of, name):
    with raises(UsageError, field="--name", value=name):
        flags_of("kubernetes", "--image=ours:1", f"--name={name}")


def test_final_exit_code_ends_the_set(request_of, flags_of):
    spec = jobset(request_of, flags_of, STORE)["spec"]
    (rule,) = spec["failurePolicy"]["rules"]
    assert rule == {"action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    job = spec["replicatedJobs"][0]["template"]["spec"]
    (rule,) = job["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"] == {"operator": "In", "values": [1, 2, 65]}


def test_manifest_of_two_slices_of_tpus(request_of, flags_of):
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
    # GKE gives the pods their indices.
    assert "coordinator_address" not in container["command"][2]
    assert "--xla_flags_preset=tpu_multislice" in container["command"][2]


@pytest.mark.parametrize(
    ("tpu", "topology", "pods", "chips"),
    [("v5e", "2x2", 1, 4), ("v6e", "2x4", 1, 8), ("v5e", "4x4", 4, 4), ("v5p", "2x2x1", 1, 4)],
)
def test_pods_and_chips_per_pod_of_a_slice(request_of, flags_of, tpu, topology, pods, chips):
    flags = (f"--tpu={tpu}", f"--tpu_topology={topology}")
    job = jobset(request_of, flags_of, STORE, *flags)["spec"]["replicatedJobs"][0]
    spec = job["template"]["spec"]
    limits = spec["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert (spec["parallelism"], limits) == (pods, {"google.com/tpu": chips})


TOPOLOGY = "--tpu_topology=4x4x4"


@pytest.mark.parametrize(
    ("folder", "flags", "field", "value"),
    [
        ("/data/run", [], "--job_log_dir", "/data/run"),
        ("/data2/run", ["--volume=a:/data"], "--job_log_dir", "/data2/run"),
        (STORE, ["--tpu=v4"], "--tpu and --tpu_topology", MISSING),
        (STORE, ["--tpu=v4", "--tpu_topology=4x4"], "--tpu_topology", "4x4"),
        (STORE, ["--tpu=v2", "--tpu_topology=4x4"], "TPU generation", "v2"),
        (STORE, ["--num_slices=2"], "--num_slices", MISSING),
        (STORE, ["--tpu=v4", TOPOLOGY, "--nodes=2"], "--tpu", "v4"),
        (STORE, ["--nodes=2"], "devices of the mesh", 128),
        (STORE, ["--gpus_per_node=4"], "devices of the mesh", 128),
    ],
)
def test_flags_that_contradict_each_other_the_folder_or_the_mesh_are_an_error(
    raises, request_of, flags_of, folder, flags, field, value
):
    with raises(UserError, field=field, value=value):
        jobset(request_of, flags_of, folder, *flags, mesh=(64, 2))
