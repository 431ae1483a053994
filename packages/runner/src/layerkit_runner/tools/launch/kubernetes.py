"""On Kubernetes: a JobSet, which starts all pods again when one of them fails.

A slice of TPUs, or a group of machines with GPUs, is a job of the set; its pods are the processes.
On GKE a TPU tells each pod which it is; elsewhere the first pod's name in the set's own network is
where they meet. An error, a wrong command or training that is not finite (exit codes 1, 2 and 65)
ends the set at once; a pod that is told to go away has time to save.

A set cannot be changed, and one that has ended is not run again: to go on, it is deleted and made
anew, which `--replace` does.

Source: the JobSet API, jobset.x-k8s.io/v1alpha2; GKE documentation, "Deploy TPU Multislices".
"""

from __future__ import annotations

import argparse
import re
import shlex
from typing import Any

from layerkit_runner.errors import UsageError
from layerkit_runner.tools.launch import scripts
from layerkit_runner.tools.launch.environment import referenced_variables, written_variables
from layerkit_runner.tools.launch.flag_values import adder, not_negative, positive
from layerkit_runner.tools.launch.recipe import Recipe
from layerkit_runner.tools.launch.request import LONGEST_NAME, Request, split_command
from layerkit_runner.tools.launch.tpu_types import TpuSlice, find_generation, parse_topology

_PORT = 8476
_JOB = "run"
_CHIPS_PER_HOST = 4


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of this kind."""

    add = adder(parser)
    add("image", "the container; docs/launch has a recipe for one", required=True, metavar="IMAGE")
    add("nodes", "machines with GPUs (default 1)", type=positive, default=1, metavar="N")
    add("gpus_per_node", "0 for none (default 0)", type=not_negative, default=0, metavar="N")
    add("tpu", "v4, v5p, v5litepod or v6e instead of GPUs", metavar="GENERATION")
    add("tpu_topology", "of a slice, such as 4x4x8", metavar="TOPOLOGY")
    add(
        "num_slices",
        "how many of them in one job (default 1)",
        type=positive,
        default=1,
        metavar="N",
    )
    add(
        "volume",
        "CLAIM:PATH, a persistent volume claim and where to mount it",
        type=_volume,
        metavar="CLAIM:PATH",
    )
    add(
        "name",
        "of the set, one for each run (default: of the experiment)",
        type=_name,
        metavar="NAME",
    )
    add(
        "replace",
        "delete the set of that name first; its pods save and leave, and the new ones go on",
        action="store_true",
    )
    add("namespace", "where the job belongs", metavar="NAME")
    add(
        "env_secret",
        "the Kubernetes secret with the variables that --env=NAME gives without a value",
        metavar="SECRET",
    )
    add("service_account", "as whom the pods run, such as to write to a store", metavar="NAME")
    add(
        "max_restarts",
        "how often all pods are started again (default 10)",
        type=not_negative,
        default=10,
        metavar="N",
    )
    add(
        "save_before_end",
        "seconds for a last save when a pod is told to go (default 300)",
        type=positive,
        default=300,
        metavar="SECONDS",
    )
    add("script", "where to write the manifest (default ./NAME.jobset.yaml)", metavar="FILE")


def _name(text: str) -> str:
    # It becomes part of the names of pods, and a name in the network.
    if not re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", text) or len(text) > LONGEST_NAME:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a lower-case letter followed by letters, digits and dashes, at most"
            f" {LONGEST_NAME} in all"
        )
    return text


def _volume(text: str) -> tuple[str, str]:
    claim, colon, path = text.partition(":")
    if not claim or not colon or not path.startswith("/"):
        raise argparse.ArgumentTypeError(f"{text!r} is not CLAIM:/PATH")
    return claim, path


def make_recipe(request: Request, options: argparse.Namespace) -> Recipe:
    """The manifest, and the commands that hand it over.

    Raises:
      UsageError: flags that do not fit together, or do not fit the experiment's mesh.
    """
    # Of all that `runner` does only this and tools.translate need it.
    import yaml

    tpu = _tpu(options)
    _check(request, options, tpu)
    preset = "gpu_latency_hiding" if options.gpus_per_node else None
    if tpu is not None:
        preset = tpu.preset(options.num_slices)
    if not options.norecommended_xla_flags:
        request = request.with_preset(preset)
    # Not in the folder of the run, which may only be in sight of the pods.
    path = options.script or f"{_set_name(request, options)}.jobset.yaml"
    text = yaml.safe_dump(manifest(request, options, tpu), sort_keys=False, width=1000)
    delete = _delete(request, options)
    return Recipe(
        files={path: text},
        commands=[
            *([delete] if options.replace else []),
            ["kubectl", "apply", f"--filename={path}"],
        ],
        afterwards=[
            f"to stop it, after saving: {shlex.join(delete)}",
            "to go on, however it ended: the same command with --replace",
        ],
    )


def _set_name(request: Request, options: argparse.Namespace) -> str:
    return options.name or request.job_name


def _delete(request: Request, options: argparse.Namespace) -> list[str]:
    # In the foreground it is over when the pods are gone, so that the next do not meet them.
    words = ["kubectl", "delete", "jobset", _set_name(request, options)]
    if options.namespace is not None:
        words.append(f"--namespace={options.namespace}")
    return [*words, "--ignore-not-found", "--cascade=foreground"]


def _tpu(options: argparse.Namespace) -> TpuSlice | None:
    if (options.tpu is None) != (options.tpu_topology is None):
        raise UsageError("--tpu and --tpu_topology belong together: --tpu=v5p --tpu_topology=4x4x8")
    if options.tpu is None:
        return None
    return parse_topology(options.tpu_topology, find_generation(options.tpu))


def _check(request: Request, options: argparse.Namespace, tpu: TpuSlice | None) -> None:
    _check_folder(request, options)
    _check_secret(options)
    if tpu is not None:
        if tpu.generation.gke_accelerator is None:
            raise UsageError(f"GKE has no {tpu.generation.name}; `runner launch tpu_vm` has.")
        if options.gpus_per_node or options.nodes > 1:
            raise UsageError(
                "--tpu says what the pods have; leave out --nodes and --gpus_per_node."
            )
        told_by = f"--tpu={options.tpu} --tpu_topology={options.tpu_topology}"
        count = tpu.num_devices * options.num_slices
        if options.num_slices > 1:
            told_by += f" --num_slices={options.num_slices}"
        request.check_devices(count, told_by, num_slices=options.num_slices)
    elif options.num_slices > 1:
        raise UsageError("--num_slices is of TPUs; machines with GPUs are counted by --nodes.")
    elif options.gpus_per_node:
        told_by = f"--nodes={options.nodes} --gpus_per_node={options.gpus_per_node}"
        request.check_devices(options.nodes * options.gpus_per_node, told_by)
    else:
        request.check_cpus(options.nodes, f"--nodes={options.nodes}", written_variables(options))


def _check_secret(options: argparse.Namespace) -> None:
    for name in referenced_variables(options):
        if options.env_secret is None:
            raise UsageError(
                f"--env={name}: expected --env_secret=SECRET with it, the Kubernetes secret that"
                f" holds {name}. Make one: kubectl create secret generic SECRET"
                f" --from-file={name}=FILE"
            )


def _check_folder(request: Request, options: argparse.Namespace) -> None:
    if request.is_in_store:
        return
    if options.volume is None:
        raise UsageError(
            f"--job_log_dir={request.folder} would be on the disk of a pod and be lost with it;"
            " give a store, such as gs://…, or --volume=CLAIM:PATH."
        )
    path = options.volume[1].rstrip("/")
    if not f"{request.folder}/".startswith(f"{path}/"):
        raise UsageError(f"--job_log_dir={request.folder} is not in --volume, which is at {path}.")


def manifest(request: Request, options: argparse.Namespace, tpu: TpuSlice | None) -> dict[str, Any]:
    """The JobSet, as values."""
    pods = _pods_per_slice(tpu) if tpu is not None else options.nodes
    metadata: dict[str, Any] = {"name": _set_name(request, options)}
    if options.namespace is not None:
        metadata["namespace"] = options.namespace
    if tpu is not None:
        # Each slice has a node pool to itself.
        topology = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}
        metadata["annotations"] = topology
    final = {
        "action": "FailJob",
        "onExitCodes": {"operator": "In", "values": [*scripts.FINAL_EXIT_CODES]},
    }
    job = {
        "parallelism": pods,
        "completions": pods,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [final]},
        "template": {"spec": _pod(request, options, tpu, num_pods=pods)},
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


def _pods_per_slice(tpu: TpuSlice) -> int:
    return max(1, tpu.num_chips // _chips_per_host(tpu))


def _chips_per_host(tpu: TpuSlice) -> int:
    # Up to 8 chips with two-dimensional topologies are one host.
    is_one_host = tpu.generation.topology_dims == 2 and tpu.num_chips <= 2 * _CHIPS_PER_HOST
    return tpu.num_chips if is_one_host else min(_CHIPS_PER_HOST, tpu.num_chips)


def _pod(
    request: Request, options: argparse.Namespace, tpu: TpuSlice | None, *, num_pods: int
) -> dict[str, Any]:
    container: dict[str, Any] = {
        "name": "runner",
        "image": options.image,
        "command": ["bash", "-c", _verbatim(_command(request, options, tpu, num_pods=num_pods))],
        "env": _environment(options),
        "volumeMounts": [{"name": "shared-memory", "mountPath": "/dev/shm"}],
    }
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": options.save_before_end,
        "containers": [container],
        # NCCL and data workers need more of it than a container has.
        "volumes": [{"name": "shared-memory", "emptyDir": {"medium": "Memory"}}],
    }
    if tpu is not None:
        container["resources"] = {"limits": {"google.com/tpu": _chips_per_host(tpu)}}
        # Between the hosts of a slice, and between slices.
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


def _environment(options: argparse.Namespace) -> list[dict[str, Any]]:
    variables = {**scripts.VARIABLES, **written_variables(options)}
    written = [{"name": name, "value": _verbatim(value)} for name, value in variables.items()]
    secret = options.env_secret
    return [
        *written,
        *(
            {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": name}}}
            for name in referenced_variables(options)
        ),
    ]


def _verbatim(text: str) -> str:
    """Escape what Kubernetes would expand in commands and variables: `$(NAME)`, and `$$`."""
    return re.sub(r"\$(?=[$(])", "$$", text)


def _command(
    request: Request, options: argparse.Namespace, tpu: TpuSlice | None, *, num_pods: int
) -> str:
    words = [shlex.quote(word) for word in split_command(options.runner, ["runner"])]
    words += [shlex.quote(word) for word in request.words]
    if tpu is None and num_pods > 1:
        # Pods are called SET-JOB-INDEX-POD, in a network that is called as the set.
        name = _set_name(request, options)
        host = f"{name}-{_JOB}-0-0.{name}"
        words += [
            f"--coordinator_address={host}:{_PORT}",
            f"--num_processes={num_pods}",
            '--process_id="$JOB_COMPLETION_INDEX"',
        ]
    # In the place of the shell, so that the signal to save reaches it.
    return "\n".join([*options.setup, f"exec {' '.join(words)}"])
