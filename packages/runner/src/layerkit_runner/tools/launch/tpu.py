"""On TPU VMs, by gcloud: a VM or pod that is there at once, or queued resources.

The actions, in the order of a run's life:

    create    ask for the TPUs; queued resources may be waited for, for minutes or days
    install   copy a clone of the repository to every host and make an environment of it
    start     start the run on every host; it goes on when this terminal is closed
    stop      tell it to save and leave, and wait until it has
    delete    give the TPUs back; nothing on their disks is kept

All hosts of all slices run the same command; a TPU tells each which it is. `--num_slices` slices of
a queued resource are one job, whose mesh spans them by `DCN_MESH_SHAPE`.
"""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Sequence

from layerkit.near_names import near_names
from layerkit_runner.errors import UsageError
from layerkit_runner.tools.launch import scripts
from layerkit_runner.tools.launch.environment import referenced_variables, written_variables
from layerkit_runner.tools.launch.flag_values import adder, not_negative, positive
from layerkit_runner.tools.launch.recipe import Recipe
from layerkit_runner.tools.launch.request import Request, split_command
from layerkit_runner.tools.launch.tpu_types import TpuSlice, parse_accelerator_type

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


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of both kinds."""
    is_queued = parser.get_default("kind") == "queued_resources"

    add = adder(parser)
    add(
        "actions",
        f"some of {', '.join(ACTIONS)}, with commas (default start)",
        type=_actions,
        default=("start",),
        metavar="ACTIONS",
    )
    add("name", "of the TPU", required=True, metavar="NAME")
    add("zone", "where it is", required=True, metavar="ZONE")
    add("project", "whom it belongs to (default: gcloud's)", metavar="PROJECT")
    add(
        "accelerator_type",
        "such as v4-128, v5p-128, v5litepod-16 or v6e-256",
        required=True,
        metavar="TYPE",
    )
    if is_queued:
        add(
            "num_slices",
            "how many of them in one job (default 1)",
            type=positive,
            default=1,
            metavar="N",
        )
        add("reserved", "take them from a reservation", action="store_true")
        add("valid_until_duration", "give up waiting after so long, such as 6h", metavar="TIME")
    add("runtime_version", "image of the hosts (default: that of the type)", metavar="VERSION")
    add("spot", "cheaper, and may be taken away", action="store_true")
    add(
        "max_restarts",
        "how often the run is started again on its hosts after a process was lost,"
        " killed or hung (default 3)",
        type=not_negative,
        default=3,
        metavar="N",
    )
    add(
        "source",
        "a clone of the repository, which `install` copies to each host (default layerkit)",
        default="layerkit",
        metavar="FOLDER",
    )
    add(
        "install_command",
        "what `install` runs on each host instead; then nothing is copied",
        metavar="LINE",
    )


def _actions(text: str) -> tuple[str, ...]:
    chosen = tuple(text.split(","))
    for action in chosen:
        if action not in ACTIONS:
            raise argparse.ArgumentTypeError(
                f"there is no action {action!r}{near_names(action, ACTIONS)} It is one of"
                f" {', '.join(ACTIONS)}."
            )
    return tuple(action for action in ACTIONS if action in chosen)


def make_recipe(request: Request, options: argparse.Namespace) -> Recipe:
    """The commands of gcloud, in order.

    Raises:
      UsageError: flags that do not fit together, or do not fit the experiment's mesh.
    """
    tpu = parse_accelerator_type(options.accelerator_type)
    num_slices = getattr(options, "num_slices", 1)
    told_by = f"--accelerator_type={options.accelerator_type}"
    if num_slices > 1:
        told_by += f" --num_slices={num_slices}"
    request.check_devices(tpu.num_devices * num_slices, told_by, num_slices=num_slices)
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
    if not options.norecommended_xla_flags:
        request = request.with_preset(tpu.preset(num_slices))
    make = {
        "create": lambda: [_create(tpu, num_slices, options)],
        "install": lambda: _install(options),
        "start": lambda: [_on_all_hosts(_start_line(request, options), options)],
        "stop": lambda: [_on_all_hosts(_stop_line(request), options)],
        "delete": lambda: [_delete(options)],
    }
    commands = [command for action in options.actions for command in make[action]()]
    return Recipe(commands=commands, afterwards=_afterwards(request, options))


def _is_queued(options: argparse.Namespace) -> bool:
    return bool(options.kind == "queued_resources")


def _gcloud(
    options: argparse.Namespace, verb: str, *words: str, operands: Sequence[str] | None = None
) -> list[str]:
    resource = "queued-resources" if _is_queued(options) else "tpu-vm"
    place = [f"--zone={options.zone}"]
    if options.project is not None:
        place.append(f"--project={options.project}")
    named = operands or [options.name]
    return ["gcloud", "compute", "tpus", resource, verb, *named, *place, *words]


def _create(tpu: TpuSlice, num_slices: int, options: argparse.Namespace) -> list[str]:
    version = options.runtime_version or tpu.generation.runtime_version
    words = [f"--accelerator-type={tpu.accelerator_type}"]
    if options.spot:
        words.append("--spot")
    if not _is_queued(options):
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


def _delete(options: argparse.Namespace) -> list[str]:
    # A queued resource that is active is only deleted with its TPUs.
    return _gcloud(options, "delete", "--quiet", *(["--force"] if _is_queued(options) else []))


def _install(options: argparse.Namespace) -> list[list[str]]:
    if options.install_command is not None:
        return [_on_all_hosts(options.install_command, options)]
    clone = os.path.expanduser(options.source)
    sources = [os.path.join(clone, name) for name in ("packages", "constraints.txt")]
    return [
        # Into a folder that is there scp copies by name, the second time over what the first left.
        _on_all_hosts(f"mkdir -p {_SOURCE}", options),
        _copy_to_all_hosts(sources, options),
        _on_all_hosts(_INSTALL, options),
    ]


def _hosts(options: argparse.Namespace) -> list[str]:
    return [*(["--node=all"] if _is_queued(options) else []), "--worker=all"]


def _on_all_hosts(line: str, options: argparse.Namespace) -> list[str]:
    return _gcloud(options, "ssh", *_hosts(options), f"--command={line}")


def _copy_to_all_hosts(paths: list[str], options: argparse.Namespace) -> list[str]:
    operands = [*paths, f"{options.name}:{_SOURCE}"]
    return _gcloud(options, "scp", "--recurse", *_hosts(options), operands=operands)


def _start_line(request: Request, options: argparse.Namespace) -> str:
    """Writes the script on the host and starts it, free of the terminal."""
    name = request.job_name
    script = shlex.quote(host_script(request, options))
    # In braces: in the background is the script alone, and not a shell that waits for the list and
    # would be what `stop` tells to leave.
    return (
        f"printf '%s' {script} > {name}.sh && {{"
        f" nohup bash {name}.sh > {name}.log 2>&1 < /dev/null & echo $! > {name}.pid; }}"
    )


def _stop_line(request: Request) -> str:
    """Tells the script to leave and waits until it has, so that `delete` does not cut off a save.

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


def host_script(request: Request, options: argparse.Namespace) -> str:
    """What runs on each host."""
    command = split_command(options.runner, [])
    run = '"${run[@]}"' if command else f'"{_ENVIRONMENT}/bin/runner" "${{run[@]}}"'
    return "\n".join(
        [
            "set -u",
            scripts.environment_lines(written_variables(options), options.setup),
            scripts.FORWARD_SIGNALS,
            scripts.words_array("run", [*command, *request.words]),
            scripts.start_and_wait(run, max_restarts=options.max_restarts),
        ]
    )


def _afterwards(request: Request, options: argparse.Namespace) -> list[str]:
    lines = []
    if "create" in options.actions and _is_queued(options):
        describe = shlex.join(_gcloud(options, "describe"))
        lines.append(f"the TPUs are there when this says ACTIVE: {describe}")
    if "start" in options.actions:
        lines.append(f"output: {request.job_name}.log on each host, and logs/ of --job_log_dir")
    return lines
