"""What `runner launch` starts: the checked command of `runner`, and the script that starts it.

A variable is written with its value (`--env=NAME=VALUE`) or passed by reference (`--env=NAME`). The
run then takes the value from the launching environment, and no file holds it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shlex
import subprocess
import sys
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from layerkit_runner.config.flags import parse_flags
from layerkit_runner.config.recorded import add_recorded_experiment
from layerkit_runner.config.registry import find_experiment
from layerkit_runner.config.requests import flag_word
from layerkit_runner.errors import UsageError
from layerkit_runner.files.atomic_write import atomic_write
from layerkit_runner.run_options import CLUSTER_FLAGS, JOINING_MODES
from layerkit_runner.tools.launch.secrets import is_secret

if TYPE_CHECKING:
    from layerkit_runner.config.requests import ResolvedExperiment

_MAX_NAME_LENGTH = 40
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ASSIGNMENT = re.compile(r"""(?:^|[\s;&|])([A-Za-z_]\w*)=["']?([^\s"';]+)""")


class Options(types.SimpleNamespace):
    """The flags of a kind, by name; `env` has (name, value or None)."""

    @property
    def written_variables(self) -> dict[str, str]:
        """The variables that are given with their values."""
        return {name: value for name, value in self.env if value is not None}

    def inherited_variables(self) -> list[str]:
        """Return the names of the referenced variables, all of which this process must have."""
        names = [name for name, value in self.env if value is None]
        for name in names:
            if name not in os.environ:
                expected = "a variable that is set in this environment"
                hint = f"Set it before the launch: export {name}=…"
                raise UsageError(field="--env", value=name, expected=expected, hint=hint)
        return names

    def command(self, default: list[str]) -> list[str]:
        """Return the words of `--runner`, or the default."""
        if self.runner is None:
            return default
        with contextlib.suppress(ValueError):  # an unmatched quote
            if words := shlex.split(self.runner):
                return words
        expected = "a command, such as `python -m mine`"
        raise UsageError(field="--runner", value=self.runner, expected=expected)


@dataclasses.dataclass(frozen=True)
class Request:
    """A checked command of `runner`; its words have an absolute folder."""

    words: tuple[str, ...]
    folder: str
    resolved: ResolvedExperiment

    @property
    def job_name(self) -> str:
        """A name for the job: lower-case letters, digits and dashes."""
        name = re.sub(r"[^a-z0-9]+", "-", self.resolved.name.rpartition(".")[2].lower())
        return name.strip("-")[:_MAX_NAME_LENGTH].strip("-") or "run"

    def script_path(self, kind: str, chosen: str | None) -> str:
        """Return the absolute path of a script: the chosen one, or one in the folder of the run."""
        if chosen is None and "://" not in self.folder:
            return os.path.join(self.folder, "launch", f"{kind}.sh")
        return os.path.abspath(chosen or f"{self.job_name}.{kind}.sh")

    def check_devices(self, count: int, flags: str) -> None:
        """Raise UsageError if the mesh has another number of devices than `flags` request."""
        # The experiment has imported the modules that this import needs.
        from layerkit_runner.partitioning.mesh import num_mesh_devices

        num_devices = num_mesh_devices(self.resolved.partitioner)
        if num_devices not in (None, count):
            raise UsageError(
                owner=self.resolved.name,
                field="devices of the mesh",
                value=num_devices,
                expected=f"{count}, as requested by {flags}",
                hint=f"Request {num_devices} devices, or change the mesh.",
                settings={"partitioner.ici_mesh_shape": "…", "partitioner.dcn_mesh_shape": "…"},
            )


def make_request(words: Sequence[str]) -> Request:
    """Parse and check the words of a command of `runner`."""
    flags = parse_flags(words)
    if flags.values.get("help") or flags.values.get("list") or flags.only_prints:
        raise UsageError("`runner launch` starts runs, but this command only prints")
    if not flags.scores_folder:
        flags = add_recorded_experiment(flags, lambda s: print(f"launch: {s}", file=sys.stderr))
    if flags.mode not in JOINING_MODES:
        expected = f"a mode that runs on a cluster: {', '.join(JOINING_MODES)}"
        raise UsageError(field="--mode", value=flags.mode, expected=expected)
    for name in CLUSTER_FLAGS:
        if name in flags.values:
            problem, hint = "the launcher sets this flag for each process", "Leave it out."
            raise UsageError(problem, field=f"--{name}", hint=hint)
    if flags.scores_folder:
        from layerkit_runner.interface.loading import resolve_folder

        resolved = resolve_folder(flags)
    else:
        # A misspelled experiment is reported before Fiddle is imported.
        find_experiment(flags.exp or "")
        from layerkit_runner.run.resolve import resolve_flags

        resolved = resolve_flags(flags)
    folder = flags.options.job_log_dir or ""
    if "://" not in folder:
        folder = os.path.abspath(os.path.expanduser(folder))
    values = {name: v for name, v in flags.values.items() if name not in ("exp", "fdl_config")}
    return Request(
        words=(
            *([] if flags.exp is None else [f"--exp={flags.exp}"]),
            *(f"--fdl.{override.path}={override.text}" for override in flags.overrides),
            *(flag_word(name, v) for name, v in (values | {"job_log_dir": folder}).items()),
        ),
        folder=folder,
        resolved=resolved,
    )


def installed_runner() -> list[str]:
    """Return the words that call `runner` in the environment of this Python."""
    script = os.path.join(os.path.dirname(sys.executable), "runner")
    return (
        [script]
        if os.access(script, os.X_OK)
        else [sys.executable, "-P", "-m", "layerkit_runner.cli"]
    )


def read_variable(text: str) -> tuple[str, str | None]:
    """Return name and value of `NAME=VALUE`, or name and None of the reference `NAME`."""
    name, equals, value = text.partition("=")
    if not _NAME.fullmatch(name):
        raise UsageError(field="--env", value=name, expected="NAME=VALUE or NAME")
    if equals and is_secret(name, value):
        raise _secret_error("--env", name)
    return name, value if equals else None


def check_setup(line: str) -> None:
    """Raise UsageError if a shell command of `--setup` holds the value of a secret."""
    for name, value in _ASSIGNMENT.findall(line):
        # The value of a variable or of a command is not in the line.
        if not value.startswith(("$", "`")) and is_secret(name, value):
            raise _secret_error("--setup", name)
    if is_secret("", line):
        raise _secret_error("--setup", "…")


def _secret_error(flag: str, name: str) -> UsageError:
    return UsageError(
        "the value of a secret would be written to a file",
        field=flag,
        value=name,
        expected="a reference without the value, --env=NAME",
        hint="Set it before the launch: export NAME=…",
    )


@dataclasses.dataclass(frozen=True)
class Script:
    """A script that starts a run.

    Attributes:
      path: Absolute path of the file, which only its owner can read and execute.
      text: Content of the file.
      program: Program that is called with the path.
      folder: Folder that must exist before the start; None for none.
      next_steps: Lines for the user, printed after the start.
      replaces_process: True if the program replaces this process and so receives its signals.
    """

    path: str
    text: str
    program: str
    folder: str | None = None
    next_steps: Sequence[str] = ()
    replaces_process: bool = False

    def lines(self) -> Iterator[str]:
        """Yield the lines of a dry run; except for the headings, a shell could run them."""
        yield f"# would write {self.path}"
        yield self.text
        yield "# would run"
        yield shlex.join([self.program, self.path])
        yield from (f"# {line}" for line in self.next_steps)

    def start(self) -> int:
        """Write the file and run the program; return its exit code."""
        try:
            if self.folder is not None:
                Path(self.folder).mkdir(parents=True, exist_ok=True)
            # It may hold variables and paths that are not for others to read.
            atomic_write(self.path, self.text, mode=0o700)
        except (OSError, UnicodeEncodeError) as error:
            raise UsageError(f"cannot write, so nothing was started: {error}") from error
        words = [self.program, self.path]
        print(f"+ {shlex.join(words)}", flush=True)
        try:
            if self.replaces_process:
                os.execvp(words[0], words)
            code = subprocess.run(words, check=False).returncode
        except FileNotFoundError:
            raise UsageError(
                "the program is not installed here, so nothing was started",
                owner=self.program,
                hint="--dry_run prints the script and the command for another machine.",
            ) from None
        if code == 0:
            print("\n".join(self.next_steps))
        return code
