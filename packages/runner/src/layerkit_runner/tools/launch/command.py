"""`runner launch KIND`: the command line.

    runner launch slurm --nodes=2 --gpus_per_node=8 --exp=… --job_log_dir=DIR      submit a run
    runner launch slurm --nodes=2 --gpus_per_node=8 --exp=… --job_log_dir=DIR --dry_run
                                                        print the script and the command
    runner launch slurm --help                          flags of a kind

All flags, the experiment and its fields are checked before anything is written or started.
"""

from __future__ import annotations

from collections.abc import Sequence

from layerkit_runner.config import flags
from layerkit_runner.config.flags import read_flags, unknown_flag
from layerkit_runner.config.help import HELP, flag_rows, table
from layerkit_runner.errors import UsageError
from layerkit_runner.run_options import FLAGS, Flag
from layerkit_runner.tools.launch import local, slurm
from layerkit_runner.tools.launch.request import Options, check_setup, make_request, read_variable

KINDS = {"local": local, "slurm": slurm}
"""Modules by the name of the kind, each with `HELP`, `FLAGS` and `make_script`."""

_COMMON = (
    Flag(
        "env",
        str,
        "environment variable of the run; repeatable. NAME alone: the value is not written to a"
        " file; it is read from this environment",
        "NAME[=VALUE]",
        repeats=True,
    ),
    Flag("setup", str, "shell command before the run; repeatable", "LINE", repeats=True),
    Flag("runner", str, "command that starts `runner`", "COMMAND"),
    Flag("script", str, "file of the script; by default in DIR/launch or, for a store, ./", "FILE"),
    Flag("dry_run", bool, "print the script and the command, and exit"),
    HELP,
)
_HELP = """\
runner launch KIND [flags of the kind] --exp=NAME --job_log_dir=DIR [flags of runner]

Start a run on a cluster or this machine. --dry_run prints the script and the command, and exits.

{kinds}

`runner launch KIND --help` prints the flags of a kind; docs/launch/ has recipes, also for TPUs and
Kubernetes."""


def run_launch(words: Sequence[str]) -> int:
    """Start or print a run, as its kind and flags request; return the exit code."""
    name, *rest = words or [""]
    if name in ("", "--help", "-h"):
        rows = [(kind, f"run an experiment {module.HELP}") for kind, module in KINDS.items()]
        print(_HELP.format(kinds="\n".join(table(rows))))
        return 0
    if name not in KINDS:
        raise UsageError("unknown kind", owner="`runner launch`", value=name, choices=KINDS)
    kind = KINDS[name]
    options, others = parse_options(name, rest)
    if options.help:
        flags = "\n".join(table(flag_rows((*kind.FLAGS, *_COMMON))))
        usage = f"runner launch {name} [flags] --exp=NAME --job_log_dir=DIR [flags of runner]"
        print(f"{usage}\n\nRun an experiment {kind.HELP}.\n\n{flags}")
        return 0
    request = make_request(others)
    # The experiment has imported the modules that this import needs.
    from layerkit_runner.run.job_errors import naming_paths

    with naming_paths(request.resolved):
        script = kind.make_script(request, options)
    if options.dry_run:
        print("\n".join(script.lines()))
        return 0
    return script.start()


def parse_options(kind: str, words: Sequence[str]) -> tuple[Options, list[str]]:
    """Return the flags of a kind, and the words that belong to `runner`."""
    rows = (*KINDS[kind].FLAGS, *_COMMON)
    values, others = read_flags(words, rows, known_only=True)
    known = [*(row.name for row in (*rows, *FLAGS)), *flags.PAX_FLAGS]
    for word in others:
        name = word.removeprefix("--").partition("=")[0]
        is_known = name.startswith("fdl.") or name in known or name.removeprefix("no") in known
        if word.startswith("--") and not is_known:
            raise unknown_flag(name, known)
    unset = {row.name: () if row.repeats else row.default for row in rows}
    options = Options(**{**unset, **values})
    options.env = [read_variable(text) for text in options.env]
    for line in options.setup:
        check_setup(line)
    return options, others
