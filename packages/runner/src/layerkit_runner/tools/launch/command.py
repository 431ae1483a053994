"""`runner launch KIND`: the command line.

    runner launch slurm --nodes=2 --gpus_per_node=8 --exp=… --job_log_dir=DIR      submit it
    runner launch slurm --nodes=2 --gpus_per_node=8 --exp=… --job_log_dir=DIR --dry_run
                                                        print what would be submitted
    runner launch slurm --help                          the flags of a kind

The flags of a kind say where to run; all others are those of `runner` itself. Both are checked, and
the experiment and its fields as well, before anything is written or started.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import types
from collections.abc import Sequence
from typing import NoReturn

from layerkit.near_names import near_names
from layerkit_runner.config.flags import FLAGS
from layerkit_runner.errors import UsageError
from layerkit_runner.run_options import OTHER_NAMES
from layerkit_runner.tools.launch import kubernetes, local, slurm, tpu
from layerkit_runner.tools.launch.data_fields import unset_data_lines
from layerkit_runner.tools.launch.environment import variable
from layerkit_runner.tools.launch.recipe import Recipe, follow, recipe_lines
from layerkit_runner.tools.launch.request import Request, Resolve, make_request
from layerkit_runner.tools.launch.values import check_values


@dataclasses.dataclass(frozen=True)
class Kind:
    """A place to run.

    Attributes:
      module: Has `add_flags(parser)` and `make_recipe(request, options)`.
      help: A line.
      runs_elsewhere: Whether the machines may see other files than this one.
    """

    module: types.ModuleType
    help: str
    runs_elsewhere: bool = False


KINDS = {
    "local": Kind(local, "on this machine, started again when it is killed or hangs"),
    "slurm": Kind(slurm, "as a batch job, queued again when its time is up"),
    "tpu_vm": Kind(tpu, "on a TPU VM or pod, by gcloud", runs_elsewhere=True),
    "queued_resources": Kind(
        tpu, "on TPUs that are waited for; one slice or several", runs_elsewhere=True
    ),
    "kubernetes": Kind(
        kubernetes, "as a JobSet, on GPUs or TPUs; one slice or several", runs_elsewhere=True
    ),
}


def run_launch(words: Sequence[str], resolve: Resolve) -> int:
    """Starts what the words after `runner launch` say, or prints it; returns the exit code.

    Args:
      words: The kind, its flags, and those of `runner`.
      resolve: Finds the experiment of parsed flags and applies their overrides.

    Raises:
      UsageError: a wrong kind, flag, experiment, field or value; a program that is not here.
    """
    name, *rest = words or [""]
    if name in ("", "--help", "-h"):
        print(_help())
        return 0
    if name not in KINDS:
        raise UsageError(
            f"there is no `runner launch {name}`{near_names(name, KINDS)} It is one of"
            f" {', '.join(KINDS)}."
        )
    kind = KINDS[name]
    parser = _parser(name, kind)
    if "--help" in rest or "-h" in rest:
        parser.print_help()
        return 0
    options, others = parser.parse_known_args(rest)
    _refuse_unknown(others, parser)
    request = make_request(others, resolve, runs_elsewhere=kind.runs_elsewhere)
    recipe = make_recipe(request, options)
    environment = {*(() if kind.runs_elsewhere else os.environ), *dict(options.env)}
    for line in unset_data_lines(request.unset_data, environment, options.setup):
        print(f"launch: {line}", file=sys.stderr)
    if options.dry_run:
        print("\n".join(recipe_lines(recipe)))
        return 0
    return follow(recipe)


def make_recipe(request: Request, options: argparse.Namespace) -> Recipe:
    """Return the files and commands that launch a request; every value is checked before.

    Args:
      request: Command that is launched.
      options: Parsed flags of a kind.

    Raises:
      UsageError: A value cannot be written, or flags do not fit together or the experiment's mesh.
    """
    check_values(request, options)
    recipe: Recipe = KINDS[options.kind].module.make_recipe(request, options)
    return recipe


class _Parser(argparse.ArgumentParser):
    """Raises what the command line shows as one line."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog.removeprefix('runner ')}: {message}")


def _parser(name: str, kind: Kind) -> argparse.ArgumentParser:
    parser = _Parser(
        prog=f"runner launch {name}",
        usage=f"runner launch {name} [flags] --exp=NAME --job_log_dir=DIR [flags of runner]",
        description=f"Runs an experiment {kind.help}.",
        allow_abbrev=False,
        add_help=False,
    )
    parser.set_defaults(kind=name)
    kind.module.add_flags(parser)
    parser.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        type=variable,
        help="an environment variable of the run; repeatable. NAME alone: its value is not written,"
        " but taken from this environment, or on Kubernetes from --env_secret",
    )
    parser.add_argument(
        "--setup",
        action="append",
        default=[],
        metavar="LINE",
        help="a line of shell before the run, such as 'module load cuda'; repeatable",
    )
    parser.add_argument("--runner", metavar="COMMAND", help="how `runner` is called there")
    parser.add_argument(
        "--norecommended_xla_flags",
        action="store_true",
        help="leave out the --xla_flags_preset that the devices are known to like",
    )
    parser.add_argument(
        "--dry_run", action="store_true", help="print what would be written and run, and leave"
    )
    return parser


def _refuse_unknown(words: Sequence[str], parser: argparse.ArgumentParser) -> None:
    """A misspelt flag of the launcher hears of the launcher's flags, not only of `runner`'s."""
    own = [text.removeprefix("--") for action in parser._actions for text in action.option_strings]
    known = [*(flag.name for flag in FLAGS), *OTHER_NAMES]
    for word in words:
        name = word.removeprefix("--").partition("=")[0]
        is_flag = word.startswith("--") and not name.startswith("fdl.")
        if not is_flag or name in known or name.removeprefix("no") in known:
            continue
        others = [other for kind in KINDS for other in _own_flags(kind) if other not in own]
        if name in others:
            kinds = [kind for kind in KINDS if name in _own_flags(kind)]
            raise UsageError(f"--{name} belongs to `runner launch {' or '.join(kinds)}`.")
        if near_names(name, own) != ".":
            raise UsageError(f"there is no flag --{name}{near_names(name, own, prefix='--')}")


def _own_flags(kind: str) -> list[str]:
    actions = _parser(kind, KINDS[kind])._actions
    return [text.removeprefix("--") for action in actions for text in action.option_strings]


def _help() -> str:
    width = max(map(len, KINDS))
    rows = [f"  {name:<{width}}  {kind.help}" for name, kind in KINDS.items()]
    return "\n".join(
        [
            "runner launch KIND [flags of the kind] --exp=NAME --job_log_dir=DIR [flags of runner]",
            "",
            "Starts a run somewhere else, or with --dry_run prints what would be started.",
            "",
            *rows,
            "",
            "`runner launch KIND --help` tells the flags of a kind; docs/launch/ has recipes.",
        ]
    )
