"""On TPU VMs, by gcloud: a VM or pod that is there at once, or queued resources.

The actions, in the order of a run's life:

    create    ask for the TPUs; queued resources may be waited for, for minutes or days
    install   copy a clone of the repository to every host and make an environment of it
    start     start the run on every host; it continues when this terminal is closed
    stop      tell it to save and leave, and wait until it has
    delete    give the TPUs back; nothing on their disks is kept

All hosts of all slices run the same command; a TPU tells each which it is. `--num_slices` slices of
a queued resource are one job, whose mesh spans them by `partitioner.dcn_mesh_shape`.
"""

from __future__ import annotations

import dataclasses
import math
import os
import shlex
from collections.abc import Sequence

from layerkit.near_names import near_names
from layerkit_runner.errors import UsageError
from layerkit_runner.run_options import Flag, positive
from layerkit_runner.tools.launch import local
from layerkit_runner.tools.launch.recipe import Recipe
from layerkit_runner.tools.launch.request import Request, split_command
from layerkit_runner.tools.launch.values import Options, referenced_variables

ACTIONS = ("create", "install", "start", "stop", "delete")

_ENVIRONMENT = "$HOME/layerkit"
_SOURCE = "layerkit-source"
# With all that the named experiments read by default; SeqIO is what C4 and The Pile come through.
_INSTALL = (
    "python3 -m pip install --user uv && python3 -m uv venv --clear --python 3.12 ~/layerkit"
    f" && cd ~/{_SOURCE} && python3 -m uv pip install --python ~/layerkit/bin/python"
    " --constraint constraints.txt ./packages/layerkit './packages/inputs[grain,hf,text,seqio]'"
    " './packages/runner[tpu]' ./packages/experiments gcsfs"
)

# A last save of a large model to a store takes minutes; beyond this something is wrong.
_SECONDS_TO_SAVE = 15 * 60


def _actions(text: str) -> tuple[str, ...]:
    chosen = text.split(",")
    for action in chosen:
        if action not in ACTIONS:
            raise ValueError(f"some of {','.join(ACTIONS)}")
    return tuple(action for action in ACTIONS if action in chosen)


REQUIRED = ("name", "zone", "accelerator_type")
FLAGS = (
    Flag("actions", _actions, f"some of {','.join(ACTIONS)}", "ACTIONS", default=("start",)),
    Flag("name", str, "name of the TPU", "NAME"),
    Flag("zone", str, "where it is", "ZONE"),
    Flag("project", str, "whom it belongs to; by default gcloud's project", "PROJECT"),
    Flag("accelerator_type", str, "such as v4-128, v5p-128, v5litepod-16 or v6e-256", "TYPE"),
    Flag("runtime_version", str, "image of the hosts; by default that of the type", "VERSION"),
    Flag("spot", bool, "cheaper, and may be taken away"),
    local.MAX_RESTARTS,
    Flag("source", str, "clone that `install` copies to each host", "FOLDER", default="layerkit"),
    Flag("install_command", str, "what `install` runs on each host, in place of a copy", "LINE"),
)
QUEUED_FLAGS = (
    Flag("num_slices", positive, "how many of them in one job", "N", default=1),
    Flag("reserved", bool, "take them from a reservation"),
    Flag("valid_until_duration", str, "give up waiting after so long, such as 6h", "TIME"),
)


@dataclasses.dataclass(frozen=True)
class TpuGeneration:
    """What all slices of a generation have in common.

    `v4-128` and `v5p-128` count tensor cores, two to a chip; `v5litepod-16` and `v6e-16` count
    chips. Each chip is a device of JAX.

    Source: Google Cloud documentation, "TPU versions", "TPU runtime versions" and "TPUs in GKE".
    """

    name: str  # in accelerator types, before the dash
    cores_per_chip: int
    topology_dims: int
    runtime_version: str  # image of its virtual machines
    gke_accelerator: str  # label of its nodes in GKE
    preset: str | None = None  # compiler flags for one slice


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
        """Return the compiler flags that are recommended for so many slices."""
        return "tpu_multislice" if num_slices > 1 else self.generation.preset


def find_generation(name: str) -> TpuGeneration:
    """Return the generation of a name; `v5e` is `v5litepod`. An unknown name is a UsageError."""
    found = GENERATIONS.get(_OTHER_NAMES.get(name, name))
    if found is None:
        raise UsageError(
            f"there is no TPU {name!r}{near_names(name, GENERATIONS)} It is one of"
            f" {', '.join(GENERATIONS)}."
        )
    return found


def parse_accelerator_type(text: str) -> TpuSlice:
    """Read an accelerator type such as `v4-128`; any other text is a UsageError."""
    name, _, number = text.rpartition("-")
    if not name or not number.isdecimal():
        raise UsageError(f"--accelerator_type={text}: expected such as v4-128, v5p-128 or v6e-16")
    generation = find_generation(name)
    chips, rest = divmod(int(number), generation.cores_per_chip)
    if rest or chips == 0:
        raise UsageError(
            f"--accelerator_type={text}: {generation.name} counts {generation.cores_per_chip}"
            " cores for each chip"
        )
    return TpuSlice(generation, chips)


def parse_topology(text: str, generation: TpuGeneration) -> TpuSlice:
    """Read a topology such as `4x4x8`; any other text is a UsageError."""
    sides = text.split("x")
    is_topology = all(side.isdecimal() and int(side) > 0 for side in sides)
    if not is_topology or len(sides) != generation.topology_dims:
        example = "4x4x8" if generation.topology_dims == 3 else "4x8"
        raise UsageError(f"topologies of {generation.name} are written {example}, not {text!r}")
    return TpuSlice(generation, math.prod(map(int, sides)))


def make_recipe(request: Request, options: Options) -> Recipe:
    """Return the commands of gcloud, in order."""
    tpu = parse_accelerator_type(options.accelerator_type)
    num_slices = getattr(options, "num_slices", 1)
    flags = f"--accelerator_type={options.accelerator_type}"
    request.check_devices(tpu.num_chips * num_slices, flags, num_slices=num_slices)
    if not request.is_in_store:
        raise UsageError(
            f"--job_log_dir={request.folder} would be on the disks of the TPU's hosts, which do not"
            " see one another's and are gone with the TPU; give a store: --job_log_dir=gs://…"
        )
    for name in referenced_variables(options):
        raise UsageError(
            f"--env={name}: expected {name}=VALUE, since the hosts of a TPU do not see this"
            " environment. Read a secret on the hosts instead:"
            f" --setup='export {name}=$(gcloud secrets versions access latest --secret=NAME)'"
        )
    request = request.with_preset(tpu.preset(num_slices), options)
    is_queued = options.kind == "queued_resources"
    make = {
        "create": lambda: [_create(tpu, num_slices, options)],
        "install": lambda: _install(options),
        "start": lambda: [_on_all_hosts(_start_line(request, options), options)],
        "stop": lambda: [_on_all_hosts(_stop_line(request), options)],
        # A queued resource that is active is only deleted with its TPUs.
        "delete": lambda: [_gcloud(options, "delete", "--quiet", *["--force"] * is_queued)],
    }
    commands = [command for action in options.actions for command in make[action]()]
    afterwards = []
    if "create" in options.actions and is_queued:
        describe = shlex.join(_gcloud(options, "describe"))
        afterwards.append(f"the TPUs are there when this says ACTIVE: {describe}")
    if "start" in options.actions:
        log = f"{request.job_name}.log on each host"
        afterwards.append(f"output: {log}, and logs/ of --job_log_dir")
    return Recipe(commands=commands, afterwards=afterwards)


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
        # Into a folder that is there scp copies by name, the second time over what the first left.
        _on_all_hosts(f"mkdir -p {_SOURCE}", options),
        _gcloud(options, "scp", "--recurse", *_hosts(options), operands=operands),
        _on_all_hosts(_INSTALL, options),
    ]


def _hosts(options: Options) -> list[str]:
    return ["--worker=all"] if options.kind == "tpu_vm" else ["--node=all", "--worker=all"]


def _on_all_hosts(line: str, options: Options) -> list[str]:
    return _gcloud(options, "ssh", *_hosts(options), f"--command={line}")


def _start_line(request: Request, options: Options) -> str:
    """Return a line that writes the script on the host and starts it, free of the terminal."""
    name = request.job_name
    script = shlex.quote(host_script(request, options))
    # In braces: in the background is the script alone, and not a shell that waits for the list and
    # would be what `stop` tells to leave.
    return (
        f"printf '%s' {script} > {name}.sh && {{"
        f" nohup bash {name}.sh > {name}.log 2>&1 < /dev/null & echo $! > {name}.pid; }}"
    )


def _stop_line(request: Request) -> str:
    """Return a line that stops the script and waits for its last save.

    The number in the file may by now be another program's; the command line tells.
    """
    name = request.job_name
    return (
        f"pid=$(cat {name}.pid 2>/dev/null);"
        f' runs() {{ grep -qsF {name}.sh "/proc/$pid/cmdline"; }};'
        f' runs || {{ echo "launch: {name} does not run here"; exit 0; }};'
        ' kill -TERM "$pid"; seconds=0;'
        f' while runs && [ "$seconds" -lt {_SECONDS_TO_SAVE} ]; do'
        # Silence for long would end the connection.
        f' if [ $((seconds % 60)) -eq 59 ]; then echo "launch: {name} still saves"; fi;'
        " sleep 1; seconds=$((seconds + 1)); done;"
        f' if runs; then echo "launch: {name} was told to save and leave and still runs after'
        f' {_SECONDS_TO_SAVE} s; look at {name}.log, or kill $pid" >&2; exit 1; fi;'
        f' echo "launch: {name} has left"'
    )


def host_script(request: Request, options: Options) -> str:
    """Return the script that runs on each host."""
    command = split_command(options.runner, [])
    run = '"${run[@]}"' if command else f'"{_ENVIRONMENT}/bin/runner" "${{run[@]}}"'
    return "\n".join(
        [
            "set -u",
            local.environment_lines(options),
            local.FORWARD_SIGNALS,
            local.words_array("run", [*command, *request.words]),
            local.start_and_wait(run, max_restarts=options.max_restarts),
        ]
    )
