"""`runner launch KIND`: the command line.

    runner launch slurm --nodes=2 --gpus_per_node=8 --exp=… --job_log_dir=DIR      submit it
    runner launch slurm --nodes=2 --gpus_per_node=8 --exp=… --job_log_dir=DIR --dry_run
                                                        print what would be submitted
    runner launch slurm --help                          the flags of a kind

The flags of a kind say where to run; all others are those of `runner` itself. Both are checked, and
the experiment and its fields as well, before anything is written or started.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from layerkit.near_names import near_names
from layerkit_runner.config.flags import read_flags, unknown_flag
from layerkit_runner.config.help import flag_rows, table
from layerkit_runner.errors import UsageError
from layerkit_runner.run_options import FLAGS, OTHER_NAMES, Flag
from layerkit_runner.tools.launch import kubernetes, local, slurm, tpu
from layerkit_runner.tools.launch.recipe import Recipe, follow, recipe_lines
from layerkit_runner.tools.launch.request import Request, Resolve, make_request
from layerkit_runner.tools.launch.values import Options, check_dashes, check_words, read_variable

if TYPE_CHECKING:
    from layerkit_runner.config.resolve import ResolvedExperiment


@dataclasses.dataclass(frozen=True)
class Kind:
    """A place to run.

    Attributes:
      help: One line.
      make_recipe: Function of a request and the flags.
      flags: Flags of this kind; all kinds have `_COMMON` too.
      required: Names of the flags that must be given.
      runs_elsewhere: Whether the machines may see other files than this one.
    """

    help: str
    make_recipe: Callable[[Request, Options], Recipe]
    flags: tuple[Flag, ...]
    required: tuple[str, ...] = ()
    runs_elsewhere: bool = True


KINDS = {
    "local": Kind(
        "on this machine, started again when it is killed or hangs",
        local.make_recipe,
        local.FLAGS,
        runs_elsewhere=False,
    ),
    "slurm": Kind(
        "as a batch job, queued again when its time is up",
        slurm.make_recipe,
        slurm.FLAGS,
        runs_elsewhere=False,
    ),
    "tpu_vm": Kind(
        "on a TPU VM or pod, by gcloud", tpu.make_recipe, tpu.FLAGS, required=tpu.REQUIRED
    ),
    "queued_resources": Kind(
        "on TPUs that are waited for; one slice or several",
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
        "an environment variable of the run; repeatable. NAME alone: its value is not written, but"
        " taken from this environment, or on Kubernetes from --env_secret",
        "NAME[=VALUE]",
        repeats=True,
    ),
    Flag("setup", str, "a line of shell before the run; repeatable", "LINE", repeats=True),
    Flag("runner", str, "how `runner` is called there", "COMMAND"),
    Flag("recommended_xla_flags", bool, "whether to add an --xla_flags_preset", default=True),
    Flag("dry_run", bool, "print what would be written and run"),
    Flag("help", bool, "print these flags"),
)


def run_launch(words: Sequence[str], resolve: Resolve) -> int:
    """Start what the words after `runner launch` say, or print it; return the exit code.

    Args:
      words: The kind, its flags, and those of `runner`.
      resolve: Finds the experiment of parsed flags and applies their overrides.

    Raises:
      UsageError: A kind, flag, experiment, field or value is wrong, or a program is not installed.
    """
    name, *rest = words or [""]
    if name in ("", "--help", "-h"):
        rows = [(kind, row.help) for kind, row in KINDS.items()]
        print(_HELP.format(kinds="\n".join(table(rows))))
        return 0
    if name not in KINDS:
        raise UsageError(
            f"there is no `runner launch {name}`{near_names(name, KINDS)} It is one of"
            f" {', '.join(KINDS)}."
        )
    options, others = parse_options(name, rest)
    if options.help:
        rows = flag_rows((*KINDS[name].flags, *_COMMON))
        print(_HELP_OF.format(kind=name, help=KINDS[name].help, flags="\n".join(table(rows))))
        return 0
    request = make_request(others, resolve, runs_elsewhere=KINDS[name].runs_elsewhere)
    if request.resolved is None:
        recipe = make_recipe(request, options)
    else:
        # The experiment has imported what this needs.
        from layerkit_runner.config.field_paths import naming_flags

        with naming_flags(request.resolved):
            recipe = make_recipe(request, options)
        for line in _unset_variables(request.resolved, options):
            print(f"launch: {line}", file=sys.stderr)
    if options.dry_run:
        print("\n".join(recipe_lines(recipe)))
        return 0
    return follow(recipe)


def parse_options(kind: str, words: Sequence[str]) -> tuple[Options, list[str]]:
    """Return the flags of a kind, and the words of `runner`; a mistake is a UsageError."""
    check_words(words)
    rows = (*KINDS[kind].flags, *_COMMON)
    given, others = read_flags(words, rows, known_only=True)
    _check_known(others, rows)
    unset = {row.name: () if row.repeats else row.default for row in rows}
    options = Options(**{**unset, **given, "kind": kind})
    options.env = [read_variable(text) for text in options.env]
    for row in rows:
        if row.name in KINDS[kind].required and row.name not in given and not options.help:
            raise UsageError(f"`runner launch {kind}` needs --{row.name}={row.metavar}: {row.help}")
    return options, others


def _check_known(words: Sequence[str], rows: Sequence[Flag]) -> None:
    """Raise an error if a word is a flag of another kind, or of no kind and not of `runner`."""
    known = [*(row.name for row in (*rows, *FLAGS)), *OTHER_NAMES]
    for word in words:
        name = word.removeprefix("--").partition("=")[0]
        is_known = name in known or name.removeprefix("no") in known
        if not word.startswith("--") or name.startswith("fdl.") or is_known:
            continue
        kinds = [kind for kind, other in KINDS.items() if name in (row.name for row in other.flags)]
        if kinds:
            raise UsageError(f"--{name} belongs to `runner launch {' or '.join(kinds)}`.")
        raise unknown_flag(name, known, known)


def make_recipe(request: Request, options: Options) -> Recipe:
    """Return the files and commands that launch a request.

    Raises:
      UsageError: A value cannot be written, or flags do not fit together or the experiment's mesh.
    """
    check_words(request.words)
    check_dashes(options)
    return KINDS[options.kind].make_recipe(request, options)


def _unset_variables(resolved: ResolvedExperiment, options: Options) -> list[str]:
    """Return a line for each variable that the inputs read and that nothing sets for the run."""
    environment = {*dict(options.env)}
    if not KINDS[options.kind].runs_elsewhere:
        environment |= {*os.environ}
    return [
        f"nothing sets {name} where the run will be, and {consequence}"
        for name, consequence in resolved.experiment.unset_variables().items()
        if name not in environment and not any(f"{name}=" in line for line in options.setup)
    ]


_HELP_OF = """\
runner launch {kind} [flags] --exp=NAME --job_log_dir=DIR [flags of runner]

Runs an experiment {help}.

{flags}"""


_HELP = """\
runner launch KIND [flags of the kind] --exp=NAME --job_log_dir=DIR [flags of runner]

Starts a run somewhere else, or with --dry_run prints what would be started.

{kinds}

`runner launch KIND --help` prints the flags of a kind; docs/launch/ has recipes."""
