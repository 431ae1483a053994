"""A JobSet for Kubernetes, which restarts all pods when one of them fails.

A slice of TPUs, or a group of machines with GPUs, is a job of the set; its pods are the processes.
On GKE the TPU gives each pod its index; elsewhere pods connect to the first pod by its name in the
set's network. An error, a wrong command or non-finite training (exit codes 1, 2 and 65) ends the
set at once. An evicted pod has time to save.

Kubernetes neither changes an existing set nor restarts a finished one: `--replace` deletes the set
and creates it again, to resume.

Source: the JobSet API, jobset.x-k8s.io/v1alpha2; GKE documentation, "Deploy TPU Multislices".
"""

from __future__ import annotations

import re
import shlex
from typing import Any

from layerkit.checks import require
from layerkit_runner.errors import UsageError
from layerkit_runner.run_options import Flag, non_negative, positive
from layerkit_runner.tools.launch import local
from layerkit_runner.tools.launch.request import LONGEST_NAME, Options, Recipe, Request
from layerkit_runner.tools.launch.tpu import TpuSlice, find_generation, parse_topology

_PORT = 8476
_JOB = "run"
_CHIPS_PER_HOST = 4


def _name(text: str) -> str:
    # It becomes part of the names of pods, and a name in the network.
    if not re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", text) or len(text) > LONGEST_NAME:
        raise ValueError(
            f"at most {LONGEST_NAME} lower-case letters, digits and dashes, beginning with a letter"
        )
    return text


def _volume(text: str) -> tuple[str, str]:
    claim, colon, path = text.partition(":")
    if not claim or not colon or not path.startswith("/"):
        raise ValueError("CLAIM:/PATH")
    return claim, path


FLAGS = (
    Flag("image", str, "image of the container; docs/launch has a recipe", "IMAGE"),
    Flag("nodes", positive, "number of machines with GPUs", "N", default=1),
    Flag("gpus_per_node", non_negative, "number of GPUs of each machine", "N", default=0),
    Flag("tpu", str, "v4, v5p, v5litepod or v6e instead of GPUs", "GENERATION"),
    Flag("tpu_topology", str, "topology of a slice, such as 4x4x8", "TOPOLOGY"),
    Flag("num_slices", positive, "number of slices of the job", "N", default=1),
    Flag("volume", _volume, "persistent volume claim and its mount point", "CLAIM:PATH"),
    Flag("name", _name, "name of the set; by default that of the experiment", "NAME"),
    Flag("replace", bool, "delete the set of that name first; its pods save and exit"),
    Flag("namespace", str, "namespace of the set", "NAME"),
    Flag("env_secret", str, "secret with the variables of --env=NAME", "SECRET"),
    Flag(
        "service_account", str, "service account of the pods, such as to write to a store", "NAME"
    ),
    Flag("max_restarts", non_negative, "limit of restarts of all pods", "N", default=10),
    Flag("save_before_end", positive, "time for a last save of a pod", "SECONDS", default=300),
    Flag("script", str, "file of the manifest; by default ./NAME.jobset.yaml", "FILE"),
)


def make_recipe(request: Request, options: Options) -> Recipe:
    """Return the manifest, and the commands that apply it."""
    # Other kinds do not load it.
    import yaml

    tpu = _tpu(options)
    _check(request, options, tpu)
    preset = "gpu_latency_hiding" if options.gpus_per_node else None
    if tpu is not None:
        preset = tpu.preset(options.num_slices)
    request = request.with_preset(preset, options)
    name = options.name or request.job_name
    # Not in the folder of the run, which only the pods may be able to write to.
    path = options.script or f"{name}.jobset.yaml"
    text = yaml.safe_dump(_manifest(request, options, tpu, name=name), sort_keys=False, width=1000)
    namespace = [] if options.namespace is None else [f"--namespace={options.namespace}"]
    delete = ["kubectl", "delete", "jobset", name, *namespace, "--ignore-not-found"]
    # Return once the pods have ended, so that new pods do not run beside them.
    delete.append("--cascade=foreground")
    apply = ["kubectl", "apply", f"--filename={path}"]
    return Recipe(
        files={path: text},
        commands=[delete, apply] if options.replace else [apply],
        next_steps=[
            f"to save and stop: {shlex.join(delete)}",
            "to resume: the same command with --replace",
        ],
    )


def _tpu(options: Options) -> TpuSlice | None:
    if (options.tpu is None) != (options.tpu_topology is None):
        expected = "both, such as --tpu=v5p --tpu_topology=4x4x8, or neither"
        raise UsageError(field="--tpu and --tpu_topology", expected=expected)
    if options.tpu is None:
        return None
    return parse_topology(options.tpu_topology, find_generation(options.tpu))


def _check(request: Request, options: Options, tpu: TpuSlice | None) -> None:
    _check_folder(request, options)
    for name in options.referenced_variables:
        if options.env_secret is None:
            raise UsageError(
                field="--env",
                value=name,
                expected=f"--env_secret=SECRET with it, a Kubernetes secret that holds {name}",
                hint=f"Make one: kubectl create secret generic SECRET --from-file={name}=FILE",
            )
    if tpu is not None:
        if options.gpus_per_node or options.nodes > 1:
            expected = "no --nodes and no --gpus_per_node with it"
            raise UsageError(field="--tpu", value=options.tpu, expected=expected)
        flags = f"--tpu={options.tpu} --tpu_topology={options.tpu_topology}"
        count = tpu.num_chips * options.num_slices
        request.check_devices(count, flags, num_slices=options.num_slices)
    elif options.num_slices > 1:
        hint = "Machines with GPUs are counted by --nodes."
        raise UsageError(field="--num_slices", expected="--tpu with it", hint=hint)
    elif options.gpus_per_node:
        flags = f"--nodes={options.nodes} --gpus_per_node={options.gpus_per_node}"
        request.check_devices(options.nodes * options.gpus_per_node, flags)
    else:
        request.check_cpus(options.nodes, f"--nodes={options.nodes}", options.written_variables)


def _check_folder(request: Request, options: Options) -> None:
    if request.is_in_store:
        return
    if options.volume is None:
        raise UsageError(
            "a folder on the disk of a pod is lost with the pod",
            field="--job_log_dir",
            value=request.folder,
            expected="a store, such as gs://…, or a folder in --volume=CLAIM:PATH",
        )
    path = options.volume[1].rstrip("/")
    is_inside = f"{request.folder}/".startswith(f"{path}/")
    expected = f"a folder in {path or '/'}, the path of --volume"
    require(is_inside, None, "--job_log_dir", request.folder, expected)


def _manifest(
    request: Request, options: Options, tpu: TpuSlice | None, *, name: str
) -> dict[str, Any]:
    """Return the JobSet of that name as values."""
    pods = options.nodes if tpu is None else max(1, tpu.num_chips // _chips_per_host(tpu))
    metadata: dict[str, Any] = {"name": name}
    if options.namespace is not None:
        metadata["namespace"] = options.namespace
    if tpu is not None:
        # Each slice has its own node pool.
        topology = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}
        metadata["annotations"] = topology
    # JAX finds the processes of TPUs itself. Pods are named SET-JOB-INDEX-POD, and their network is
    # named SET.
    address = None if tpu is not None else f"{name}-{_JOB}-0-0.{name}:{_PORT}"
    final = {
        "action": "FailJob",
        "onExitCodes": {"operator": "In", "values": [*local.FINAL_EXIT_CODES]},
    }
    job = {
        "parallelism": pods,
        "completions": pods,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [final]},
        "template": {"spec": _pod(options, tpu, _command(request, options, address, pods))},
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {
            "failurePolicy": {
                "maxRestarts": options.max_restarts,
                "rules": [{"action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}],
            },
            "replicatedJobs": [
                {"name": _JOB, "replicas": options.num_slices, "template": {"spec": job}}
            ],
        },
    }


def _chips_per_host(tpu: TpuSlice) -> int:
    # With two-dimensional topologies, up to 8 chips are one host.
    is_one_host = tpu.generation.topology_dims == 2 and tpu.num_chips <= 2 * _CHIPS_PER_HOST
    return tpu.num_chips if is_one_host else min(_CHIPS_PER_HOST, tpu.num_chips)


def _pod(options: Options, tpu: TpuSlice | None, command: str) -> dict[str, Any]:
    container: dict[str, Any] = {
        "name": "runner",
        "image": options.image,
        "command": ["bash", "-c", _verbatim(command)],
        "env": _environment(options),
        "volumeMounts": [{"name": "shared-memory", "mountPath": "/dev/shm"}],
    }
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": options.save_before_end,
        "containers": [container],
        # NCCL and data workers need more shared memory than the default of a container.
        "volumes": [{"name": "shared-memory", "emptyDir": {"medium": "Memory"}}],
    }
    if tpu is not None:
        container["resources"] = {"limits": {"google.com/tpu": _chips_per_host(tpu)}}
        # Ports between the hosts of a slice, and between slices.
        container["ports"] = [{"containerPort": 8471}, {"containerPort": 8080}]
        pod["nodeSelector"] = {
            "cloud.google.com/gke-tpu-accelerator": tpu.generation.gke_accelerator,
            "cloud.google.com/gke-tpu-topology": options.tpu_topology,
        }
    else:
        if options.gpus_per_node:
            limits = {"nvidia.com/gpu": options.gpus_per_node}
            container["resources"] = {"limits": limits}
        container["ports"] = [{"containerPort": _PORT}]
    if options.volume is not None:
        claim, path = options.volume
        container["volumeMounts"].append({"name": "data", "mountPath": path})
        pod["volumes"].append({"name": "data", "persistentVolumeClaim": {"claimName": claim}})
    if options.service_account is not None:
        pod["serviceAccountName"] = options.service_account
    return pod


def _environment(options: Options) -> list[dict[str, Any]]:
    variables = {**local.VARIABLES, **options.written_variables}
    written = [{"name": name, "value": _verbatim(value)} for name, value in variables.items()]
    referenced = [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": options.env_secret, "key": name}}}
        for name in options.referenced_variables
    ]
    return [*written, *referenced]


def _verbatim(text: str) -> str:
    """Escape what Kubernetes would expand in commands and variables: `$(NAME)`, and `$$`."""
    return re.sub(r"\$(?=[$(])", "$$", text)


def _command(request: Request, options: Options, address: str | None, num_pods: int) -> str:
    command = [*options.command(["runner"]), *request.words]
    words = [shlex.quote(word) for word in command]
    if address is not None and num_pods > 1:
        words += [f"--coordinator_address={address}", f"--num_processes={num_pods}"]
        words.append('--process_id="$JOB_COMPLETION_INDEX"')
    # Replaces the shell, so that the run receives the signal to save.
    return "\n".join([*options.setup, f"exec {' '.join(words)}"])
