"""`runner launch KIND`: the command line.

    runner launch slurm --nodes=2 --gpus_per_node=8 --exp=… --job_log_dir=DIR      submit a run
    runner launch slurm --nodes=2 --gpus_per_node=8 --exp=… --job_log_dir=DIR --dry_run
                                                        print the files and commands
    runner launch slurm --help                          flags of a kind

All flags, the experiment and its fields are checked before anything is written or started.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Callable, Sequence

from layerkit_runner.config.flags import read_flags, unknown_flag
from layerkit_runner.config.help import flag_rows, table
from layerkit_runner.errors import UsageError
from layerkit_runner.run_options import FLAGS, OTHER_NAMES, Flag
from layerkit_runner.tools.launch import kubernetes, local, slurm, tpu
from layerkit_runner.tools.launch.request import (
    Options,
    Recipe,
    Request,
    Resolve,
    check_dashes,
    check_words,
    execute,
    make_request,
    read_variable,
    recipe_lines,
)


@dataclasses.dataclass(frozen=True)
class Kind:
    """A place to run.

    Attributes:
      help: Clause that completes "Run an experiment".
      make_recipe: Function of a request and the flags that returns the files and commands.
      flags: Flags of this kind, beside those of `_COMMON`.
      required: Names of the flags that must be given.
      runs_elsewhere: True if the machines may see other files than this one.
    """

    help: str
    make_recipe: Callable[[Request, Options], Recipe]
    flags: tuple[Flag, ...]
    required: tuple[str, ...] = ()
    runs_elsewhere: bool = True


KINDS = {
    "local": Kind(
        "on this machine, with restarts after a kill or a hang",
        local.make_recipe,
        local.FLAGS,
        runs_elsewhere=False,
    ),
    "slurm": Kind(
        "as a batch job, requeued at its time limit",
        slurm.make_recipe,
        slurm.FLAGS,
        runs_elsewhere=False,
    ),
    "tpu_vm": Kind(
        "on a TPU VM or pod, by gcloud", tpu.make_recipe, tpu.FLAGS, required=tpu.REQUIRED
    ),
    "queued_resources": Kind(
        "on TPUs that are requested through a queue; one slice or several",
        tpu.make_recipe,
        (*tpu.FLAGS, *tpu.QUEUED_FLAGS),
        required=tpu.REQUIRED,
    ),
    "kubernetes": Kind(
        "as a JobSet, on GPUs or TPUs; one slice or several",
        kubernetes.make_recipe,
        kubernetes.FLAGS,
        required=("image",),
    ),
}
_COMMON = (
    Flag(
        "env",
        str,
        "environment variable of the run; repeatable. NAME alone: the value is not written to a"
        " file; it is read from this environment, or on Kubernetes from --env_secret",
        "NAME[=VALUE]",
        repeats=True,
    ),
    Flag("setup", str, "shell command before the run; repeatable", "LINE", repeats=True),
    Flag("runner", str, "command that starts `runner`", "COMMAND"),
    Flag("recommended_xla_flags", bool, "add an --xla_flags_preset for the devices", default=True),
    Flag("dry_run", bool, "print the files and commands, and exit"),
    Flag("help", bool, "print these flags"),
)


def run_launch(words: Sequence[str], resolve: Resolve) -> int:
    """Start or print a run, as requested by the words after `runner launch`.

    Args:
      words: Name of the kind, its flags, and those of `runner`.
      resolve: Function that finds the experiment of parsed flags and applies their overrides.

    Returns:
      The exit code.

    Raises:
      UsageError: A kind, flag, experiment, field or value is wrong, or a program is not installed.
    """
    name, *rest = words or [""]
    if name in ("", "--help", "-h"):
        rows = [(kind, row.help) for kind, row in KINDS.items()]
        print(_HELP.format(kinds="\n".join(table(rows))))
        return 0
    if name not in KINDS:
        raise UsageError("unknown kind", owner="`runner launch`", value=name, choices=KINDS)
    options, others = parse_options(name, rest)
    if options.help:
        rows = flag_rows((*KINDS[name].flags, *_COMMON))
        print(_HELP_OF.format(kind=name, help=KINDS[name].help, flags="\n".join(table(rows))))
        return 0
    request = make_request(others, resolve, runs_elsewhere=KINDS[name].runs_elsewhere)
    with contextlib.ExitStack() as stack:
        if request.resolved is not None:
            # The experiment has imported the modules that this import needs.
            from layerkit_runner.config.field_paths import naming_flags

            stack.enter_context(naming_flags(request.resolved))
        recipe = make_recipe(request, options)
    if request.resolved is not None:
        environment = {**({} if KINDS[name].runs_elsewhere else os.environ), **dict(options.env)}
        for variable, consequence in request.resolved.experiment.unset_variables().items():
            is_set_up = any(f"{variable}=" in line for line in options.setup)
            if variable not in environment and not is_set_up:
                print(f"launch: {variable} is not set for the run: {consequence}", file=sys.stderr)
    if options.dry_run:
        print("\n".join(recipe_lines(recipe)))
        return 0
    return execute(recipe)


def parse_options(kind: str, words: Sequence[str]) -> tuple[Options, list[str]]:
    """Return the flags of a kind, and the words that belong to `runner`."""
    check_words(words)
    rows = (*KINDS[kind].flags, *_COMMON)
    given, others = read_flags(words, rows, known_only=True)
    _check_known(others, rows)
    unset = {row.name: () if row.repeats else row.default for row in rows}
    options = Options(**{**unset, **given, "kind": kind})
    options.env = [read_variable(text) for text in options.env]
    for row in rows:
        if row.name in KINDS[kind].required and row.name not in given and not options.help:
            hint = f"Set --{row.name}={row.metavar}: {row.help}"
            owner = f"`runner launch {kind}`"
            raise UsageError("missing flag", owner=owner, field=f"--{row.name}", hint=hint)
    return options, others


def _check_known(words: Sequence[str], rows: Sequence[Flag]) -> None:
    """Raise UsageError if a word is a flag of another kind, or an unknown flag."""
    known = [*(row.name for row in (*rows, *FLAGS)), *OTHER_NAMES]
    for word in words:
        name = word.removeprefix("--").partition("=")[0]
        is_known = name in known or name.removeprefix("no") in known
        if not word.startswith("--") or name.startswith("fdl.") or is_known:
            continue
        kinds = [kind for kind, other in KINDS.items() if name in (row.name for row in other.flags)]
        if kinds:
            expected = f"`runner launch {' or '.join(kinds)}`"
            raise UsageError("flag of another kind", field=f"--{name}", expected=expected)
        raise unknown_flag(name, known, known)


def make_recipe(request: Request, options: Options) -> Recipe:
    """Return the files and commands that launch a request.

    Raises:
      UsageError: A value cannot be written, or the flags contradict each other or the mesh.
    """
    check_words(request.words)
    check_dashes(options)
    return KINDS[options.kind].make_recipe(request, options)


_HELP_OF = """\
runner launch {kind} [flags] --exp=NAME --job_log_dir=DIR [flags of runner]

Run an experiment {help}.

{flags}"""


_HELP = """\
runner launch KIND [flags of the kind] --exp=NAME --job_log_dir=DIR [flags of runner]

Start a run on a cluster or this machine. --dry_run prints the files and commands, and exits.

{kinds}

`runner launch KIND --help` prints the flags of a kind; docs/launch/ has recipes."""
