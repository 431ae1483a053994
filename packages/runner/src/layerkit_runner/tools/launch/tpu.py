"""Commands of gcloud for TPU VMs and queued resources.

The actions, in the order in which they run:

    create    request the TPUs; queued resources may become active after minutes or days
    install   copy a clone of the repository to every host and install it in an environment
    start     start the run on every host; it continues after this terminal is closed
    stop      make the run save and exit, and wait for it
    delete    delete the TPUs with their disks

All hosts of all slices run the same command, and the TPU gives each its index. `--num_slices`
slices of a queued resource are one job; its mesh spans them by `partitioner.dcn_mesh_shape`.
"""

from __future__ import annotations

import dataclasses
import math
import os
import shlex
from collections.abc import Sequence

from layerkit.checks import require
from layerkit_runner.errors import UsageError
from layerkit_runner.run_options import Flag, positive
from layerkit_runner.tools.launch import local
from layerkit_runner.tools.launch.request import Options, Recipe, Request

ACTIONS = ("create", "install", "start", "stop", "delete")

_ENVIRONMENT = "$HOME/layerkit"
_SOURCE = "layerkit-source"
# With the extras that read the data of the named experiments; C4 and The Pile need SeqIO.
_INSTALL = (
    "python3 -m pip install --user uv && python3 -m uv venv --clear --python 3.12 ~/layerkit"
    f" && cd ~/{_SOURCE} && python3 -m uv pip install --python ~/layerkit/bin/python"
    " --constraint constraints.txt ./packages/layerkit './packages/inputs[grain,hf,text,seqio]'"
    " './packages/runner[tpu]' ./packages/experiments gcsfs"
)

# The last save of a large model to a store takes minutes.
_SECONDS_TO_SAVE = 15 * 60


def _actions(text: str) -> tuple[str, ...]:
    chosen = text.split(",")
    if not set(chosen) <= set(ACTIONS):
        raise ValueError(f"some of {','.join(ACTIONS)}")
    return tuple(action for action in ACTIONS if action in chosen)


REQUIRED = ("name", "zone", "accelerator_type")
FLAGS = (
    Flag("actions", _actions, f"some of {','.join(ACTIONS)}", "ACTIONS", default=("start",)),
    Flag("name", str, "name of the TPU", "NAME"),
    Flag("zone", str, "zone of the TPU", "ZONE"),
    Flag("project", str, "project of the TPU; by default gcloud's project", "PROJECT"),
    Flag("accelerator_type", str, "type: v4-128, v5p-128, v5litepod-16, v6e-256, …", "TYPE"),
    Flag("runtime_version", str, "image of the hosts; by default that of the type", "VERSION"),
    Flag("spot", bool, "use spot capacity, which is cheaper and may be reclaimed"),
    local.MAX_RESTARTS,
    Flag("source", str, "clone that `install` copies to each host", "FOLDER", default="layerkit"),
    Flag("install_command", str, "command of `install` on each host, in place of a copy", "LINE"),
)
QUEUED_FLAGS = (
    Flag("num_slices", positive, "number of slices of the job", "N", default=1),
    Flag("reserved", bool, "use capacity of a reservation"),
    Flag("valid_until_duration", str, "limit of the time in the queue, such as 6h", "TIME"),
)


@dataclasses.dataclass(frozen=True)
class TpuGeneration:
    """Properties of all slices of a TPU generation.

    `v4-128` and `v5p-128` count tensor cores, two to a chip; `v5litepod-16` and `v6e-16` count
    chips. Each chip is a device of JAX.

    Source: Google Cloud documentation, "TPU versions", "TPU runtime versions" and "TPUs in GKE".

    Attributes:
      name: Name in accelerator types, before the dash.
      cores_per_chip: Number by which accelerator types count a chip.
      topology_dims: Number of dimensions of a topology.
      runtime_version: Image of the virtual machines.
      gke_accelerator: Label of the nodes in GKE.
      preset: Preset of compiler flags for one slice; None for no preset.
    """

    name: str
    cores_per_chip: int
    topology_dims: int
    runtime_version: str
    gke_accelerator: str
    preset: str | None = None


_V5E, _V6E = "tpu_v5e_collective_fusion", "tpu_v6e_dense"
GENERATIONS = {
    "v4": TpuGeneration("v4", 2, 3, "tpu-ubuntu2204-base", "tpu-v4-podslice"),
    "v5p": TpuGeneration("v5p", 2, 3, "v2-alpha-tpuv5", "tpu-v5p-slice"),
    "v5litepod": TpuGeneration(
        "v5litepod", 1, 2, "v2-alpha-tpuv5-lite", "tpu-v5-lite-podslice", _V5E
    ),
    "v6e": TpuGeneration("v6e", 1, 2, "v2-alpha-tpuv6e", "tpu-v6e-slice", _V6E),
}
_OTHER_NAMES = {"v5e": "v5litepod", "v5lite": "v5litepod"}


@dataclasses.dataclass(frozen=True)
class TpuSlice:
    """One slice: a generation and a number of chips."""

    generation: TpuGeneration
    num_chips: int

    def preset(self, num_slices: int) -> str | None:
        """Return the recommended preset of compiler flags for a number of slices."""
        return "tpu_multislice" if num_slices > 1 else self.generation.preset


def find_generation(name: str) -> TpuGeneration:
    """Return the generation of a name, where `v5e` is `v5litepod`."""
    found = GENERATIONS.get(_OTHER_NAMES.get(name, name))
    if found is None:
        raise UsageError(field="TPU generation", value=name, choices=GENERATIONS)
    return found


def parse_accelerator_type(text: str) -> TpuSlice:
    """Return the slice of an accelerator type such as `v4-128`."""
    name, _, number = text.rpartition("-")
    require(
        name and number.isdecimal(), None, "--accelerator_type", text, "TYPE-NUMBER, such as v4-128"
    )
    generation = find_generation(name)
    cores = generation.cores_per_chip
    chips, rest = divmod(int(number), cores)
    expected = f"a positive multiple of {cores}, the cores of each {generation.name} chip"
    require(chips > 0 and rest == 0, None, "--accelerator_type", text, expected)
    return TpuSlice(generation, chips)


def parse_topology(text: str, generation: TpuGeneration) -> TpuSlice:
    """Return the slice of a topology such as `4x4x8`."""
    sides, dims = text.split("x"), generation.topology_dims
    is_valid = len(sides) == dims and all(side.isdecimal() and int(side) > 0 for side in sides)
    example = "4x4x8" if dims == 3 else "4x8"
    expected = f"{dims} dimensions for {generation.name}, such as {example}"
    require(is_valid, None, "--tpu_topology", text, expected)
    return TpuSlice(generation, math.prod(map(int, sides)))


def make_recipe(request: Request, options: Options) -> Recipe:
    """Return the commands of gcloud, in order."""
    tpu = parse_accelerator_type(options.accelerator_type)
    num_slices = getattr(options, "num_slices", 1)
    flags = f"--accelerator_type={options.accelerator_type}"
    request.check_devices(tpu.num_chips * num_slices, flags, num_slices=num_slices)
    if not request.is_in_store:
        raise UsageError(
            "the disks of TPU hosts are not shared and are deleted with the TPU",
            field="--job_log_dir",
            value=request.folder,
            expected="a folder in a store, such as gs://…",
        )
    for name in options.referenced_variables:
        raise UsageError(
            "TPU hosts do not have the variables of this environment",
            field="--env",
            value=name,
            expected=f"--env={name}=VALUE",
            hint="Read a secret on the hosts:"
            f" --setup='export {name}=$(gcloud secrets versions access latest --secret=NAME)'",
        )
    request = request.with_preset(tpu.preset(num_slices), options)
    is_queued = options.kind == "queued_resources"
    make = {
        "create": lambda: [_create(tpu, num_slices, options)],
        "install": lambda: _install(options),
        "start": lambda: [_on_all_hosts(_start_line(request, options), options)],
        "stop": lambda: [_on_all_hosts(_stop_line(request), options)],
        # Without --force an active queued resource is not deleted.
        "delete": lambda: [_gcloud(options, "delete", "--quiet", *["--force"] * is_queued)],
    }
    commands = [command for action in options.actions for command in make[action]()]
    next_steps = []
    if "create" in options.actions and is_queued:
        describe = shlex.join(_gcloud(options, "describe"))
        next_steps.append(f"the TPUs can be used when this prints ACTIVE: {describe}")
    if "start" in options.actions:
        log = f"{request.job_name}.log on each host"
        next_steps.append(f"output: {log}, and logs/ of --job_log_dir")
    return Recipe(commands=commands, next_steps=next_steps)


def _gcloud(
    options: Options, verb: str, *words: str, operands: Sequence[str] | None = None
) -> list[str]:
    project = [] if options.project is None else [f"--project={options.project}"]
    place = [*(operands or [options.name]), f"--zone={options.zone}", *project]
    kind = options.kind.replace("_", "-")
    return ["gcloud", "compute", "tpus", kind, verb, *place, *words]


def _create(tpu: TpuSlice, num_slices: int, options: Options) -> list[str]:
    version = options.runtime_version or tpu.generation.runtime_version
    number = tpu.num_chips * tpu.generation.cores_per_chip
    words = [f"--accelerator-type={tpu.generation.name}-{number}"]
    if options.spot:
        words.append("--spot")
    if options.kind == "tpu_vm":
        return _gcloud(options, "create", *words, f"--version={version}")
    words.append(f"--runtime-version={version}")
    if num_slices > 1:
        words += [f"--node-count={num_slices}", f"--node-prefix={options.name}"]
    else:
        words.append(f"--node-id={options.name}")
    if options.reserved:
        words.append("--reserved")
    if options.valid_until_duration is not None:
        words.append(f"--valid-until-duration={options.valid_until_duration}")
    return _gcloud(options, "create", *words)


def _install(options: Options) -> list[list[str]]:
    if options.install_command is not None:
        return [_on_all_hosts(options.install_command, options)]
    clone = os.path.expanduser(options.source)
    sources = [os.path.join(clone, name) for name in ("packages", "constraints.txt")]
    operands = [*sources, f"{options.name}:{_SOURCE}"]
    return [
        # If the folder exists, scp copies into it by name and overwrites an earlier copy.
        _on_all_hosts(f"mkdir -p {_SOURCE}", options),
        _gcloud(options, "scp", "--recurse", *_hosts(options), operands=operands),
        _on_all_hosts(_INSTALL, options),
    ]


def _hosts(options: Options) -> list[str]:
    return ["--worker=all"] if options.kind == "tpu_vm" else ["--node=all", "--worker=all"]


def _on_all_hosts(line: str, options: Options) -> list[str]:
    return _gcloud(options, "ssh", *_hosts(options), f"--command={line}")


def _start_line(request: Request, options: Options) -> str:
    """Return a line that writes the script on the host and starts it without a terminal."""
    name = request.job_name
    script = shlex.quote(host_script(request, options))
    # Braces put the script alone in the background, not a shell that waits for the list and would
    # receive the signal of `stop`.
    return (
        f"printf '%s' {script} > {name}.sh && {{"
        f" nohup bash {name}.sh > {name}.log 2>&1 < /dev/null & echo $! > {name}.pid; }}"
    )


def _stop_line(request: Request) -> str:
    """Return a line that stops the script and waits for its last save.

    The process number in the file may belong to another program by now, so the line compares the
    command of the process.
    """
    name = request.job_name
    return (
        f"pid=$(cat {name}.pid 2>/dev/null);"
        f' runs() {{ grep -qsF {name}.sh "/proc/$pid/cmdline"; }};'
        f' runs || {{ echo "launch: {name} is not running on this host"; exit 0; }};'
        ' kill -TERM "$pid"; seconds=0;'
        f' while runs && [ "$seconds" -lt {_SECONDS_TO_SAVE} ]; do'
        # A connection without output is closed.
        f' if [ $((seconds % 60)) -eq 59 ]; then echo "launch: {name} is still saving"; fi;'
        " sleep 1; seconds=$((seconds + 1)); done;"
        f' if runs; then echo "launch: {name} is still running {_SECONDS_TO_SAVE} s'
        f' after SIGTERM; see {name}.log, or kill $pid" >&2; exit 1; fi;'
        f' echo "launch: {name} has exited"'
    )


def host_script(request: Request, options: Options) -> str:
    """Return the script that runs on each host."""
    command = options.command([])
    run = '"${run[@]}"' if command else f'"{_ENVIRONMENT}/bin/runner" "${{run[@]}}"'
    return "\n".join(
        [
            "set -u",
            local.environment_lines(options),
            local.FORWARD_SIGNALS,
            local.bash_array("run", [*command, *request.words]),
            local.restart_loop(run, max_restarts=options.max_restarts),
        ]
    )
