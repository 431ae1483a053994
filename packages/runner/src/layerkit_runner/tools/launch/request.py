"""What `runner launch` starts: the checked command of `runner`, and the files and commands for it.

Each writer of scripts and manifests quotes values for its own format. Values that no format can
hold safely are errors here. A variable is written with its value (`--env=NAME=VALUE`) or passed by
reference (`--env=NAME`). The run then takes the value from where the launcher keeps it, and no file
holds it.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import shlex
import subprocess
import sys
import types
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from layerkit_runner.config.flags import ParsedFlags, flag_word, parse_flags
from layerkit_runner.config.recorded import with_recorded_experiment
from layerkit_runner.errors import UsageError
from layerkit_runner.files.atomic_write import atomic_write
from layerkit_runner.run_options import JOINING_MODES, RunOptions

if TYPE_CHECKING:
    from layerkit_runner.config.resolve import ResolvedExperiment

Resolve = Callable[[ParsedFlags], "ResolvedExperiment"]

# Longest job name that Kubernetes, the strictest kind, accepts.
LONGEST_NAME = 40

_SET_BY_LAUNCHER = ("coordinator_address", "num_processes", "process_id", "multiprocess_gpu")
_MESH_SETTINGS = {"partitioner.ici_mesh_shape": "…", "partitioner.dcn_mesh_shape": "…"}


# Control characters, line and paragraph separators, and bytes that are no UTF-8: each can end a
# line where a program reads one, or cannot be written at all.
_INVALID_CATEGORIES = ("Cc", "Zl", "Zp", "Cs")
# Options of sbatch, and variables, which hold options such as XLA_FLAGS=--xla_….
_MAY_BEGIN_WITH_DASH = ("sbatch", "env")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECRET_NAME = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|PASSWD)(_|$)", re.IGNORECASE)


class Options(types.SimpleNamespace):
    """The flags of a kind, by name; `kind` is its name, and `env` has (name, value or None)."""

    @property
    def written_variables(self) -> dict[str, str]:
        """The variables that are given with their values."""
        return {name: value for name, value in self.env if value is not None}

    @property
    def referenced_variables(self) -> list[str]:
        """Names of the variables that are given without their values."""
        return [name for name, value in self.env if value is None]

    def inherited_variables(self) -> list[str]:
        """Return the names of the referenced variables, all of which this process must have."""
        for name in self.referenced_variables:
            if name not in os.environ:
                raise UsageError(
                    field="--env",
                    value=name,
                    expected="a variable that is set in this environment",
                    hint=f"Set it before the launch: export {name}=…",
                )
        return self.referenced_variables

    def command(self, default: list[str]) -> list[str]:
        """Return the words of `--runner`, or the default; raise UsageError if it is no command."""
        if self.runner is None:
            return default
        try:
            words = shlex.split(self.runner)
        except ValueError:  # an unmatched quote
            words = []
        if not words:
            expected = "a command, such as `python -m mine`"
            raise UsageError(field="--runner", value=self.runner, expected=expected)
        return words


@dataclasses.dataclass(frozen=True)
class Request:
    """A checked command of `runner`.

    Attributes:
      words: Words after `runner`, with an absolute folder.
      options: Options of the run.
      mode: Value of `--mode`.
      experiment: Name of the experiment.
      mesh: Number of devices of the mesh within a slice, and number of slices. None if the mesh
        takes all devices, or if the experiment could not be imported here.
      resolved: The experiment, if it could be imported here.
    """

    words: tuple[str, ...]
    options: RunOptions
    mode: str
    experiment: str
    mesh: tuple[int, int] | None = None
    resolved: ResolvedExperiment | None = None

    @property
    def job_name(self) -> str:
        """A name for the job: lower-case letters, digits and dashes."""
        name = re.sub(r"[^a-z0-9]+", "-", self.experiment.rpartition(".")[2].lower())
        return name.strip("-")[:LONGEST_NAME].strip("-") or "run"

    @property
    def folder(self) -> str:
        """`--job_log_dir`, absolute."""
        return self.options.job_log_dir or ""

    @property
    def is_in_store(self) -> bool:
        """True if the folder is in a store, such as `gs://…`."""
        return "://" in self.folder

    def with_preset(self, preset: str | None, options: Options) -> Request:
        """Return the request with a preset of compiler flags, unless it has one or excludes it."""
        has_preset = self.options.xla_flags_preset is not None
        is_wanted = options.recommended_xla_flags and self.mode == "train"
        if preset is None or has_preset or not is_wanted:
            return self
        return dataclasses.replace(self, words=(*self.words, f"--xla_flags_preset={preset}"))

    def check_devices(self, count: int, flags: str, *, num_slices: int | None = None) -> None:
        """Raise UsageError if the mesh has another number of devices than the job.

        Args:
          count: Number of devices of the job.
          flags: Flags that request these devices, for the message.
          num_slices: Number of slices of TPUs; None for GPUs.
        """
        if self.mesh is None:
            return
        if num_slices is not None and num_slices > 1:
            flags += f" --num_slices={num_slices}"
        within, across = self.mesh
        wanted = {"devices": (within * across, count)}
        if num_slices is not None:
            wanted["slices"] = (across, num_slices)
        for name, (value, expected) in wanted.items():
            if value != expected:
                raise UsageError(
                    owner=self.experiment,
                    field=f"{name} of the mesh",
                    value=value,
                    expected=f"{expected}, as requested by {flags}",
                    hint=f"Request {value} {name}, or change the mesh.",
                    settings=_MESH_SETTINGS,
                )

    def check_cpus(self, num_processes: int, flags: str, variables: Mapping[str, str]) -> None:
        """Raise UsageError if the mesh has more devices than the processes, one CPU each.

        Args:
          num_processes: Number of processes of the job.
          flags: Flags that request these processes, for the message.
          variables: Environment of the processes, which may give each several devices.
        """
        in_flags = "xla_force_host_platform_device_count" in variables.get("XLA_FLAGS", "")
        if self.mesh is None or in_flags or "JAX_NUM_CPU_DEVICES" in variables:
            return
        if (count := math.prod(self.mesh)) > num_processes:
            raise UsageError(
                owner=self.experiment,
                field="devices of the mesh",
                value=count,
                expected=f"at most {num_processes}, one CPU for each process of {flags}",
                hint="Request GPUs by --gpus_per_node, or change the mesh to run on CPUs.",
                settings=_MESH_SETTINGS,
            )


def make_request(words: Sequence[str], resolve: Resolve, *, runs_elsewhere: bool) -> Request:
    """Parse and check the words of a command of `runner`.

    Args:
      words: Words after `runner`.
      resolve: Function that finds the experiment and applies the overrides.
      runs_elsewhere: True if the run may see other files than this machine. A file or package that
        is missing here is then reported and is no error.

    Raises:
      UsageError: A flag, experiment, field or value is wrong, or the mode needs no launcher.
    """
    flags = parse_flags(words)
    if flags.exp is None:
        flags = with_recorded_experiment(flags, _report)
    if flags.given.get("help") or flags.given.get("list") or flags.only_prints:
        raise UsageError("`runner launch` starts runs, but this command only prints")
    if flags.mode not in JOINING_MODES:
        expected = f"a mode that runs on a cluster: {', '.join(JOINING_MODES)}"
        raise UsageError(field="--mode", value=flags.mode, expected=expected)
    for name in _SET_BY_LAUNCHER:
        if name in flags.given:
            raise UsageError(
                "the launcher sets this flag for each process",
                field=f"--{name}",
                hint="Leave it out.",
            )
    folder = flags.options.job_log_dir
    if folder is not None and "://" not in folder:
        folder = os.path.abspath(os.path.expanduser(folder))
        options = dataclasses.replace(flags.options, job_log_dir=folder)
        given = {**flags.given, "job_log_dir": folder}
        flags = dataclasses.replace(flags, given=given, options=options)
    others = {name: v for name, v in flags.given.items() if name not in ("exp", "fdl_config")}
    request = Request(
        words=(
            f"--exp={flags.exp}",
            *(f"--fdl.{override.path}={override.text}" for override in flags.overrides),
            *(flag_word(name, value) for name, value in others.items()),
        ),
        options=flags.options,
        mode=flags.mode,
        experiment=flags.exp or "",
    )
    try:
        resolved = resolve(flags)
    except UsageError as error:
        # A file that a validate() could not open here may exist there.
        if not runs_elsewhere or not isinstance(error.__cause__, (OSError, ImportError)):
            raise
        _report(f"the experiment is not checked on this machine: {error}")
        return request
    within = getattr(resolved.partitioner, "ici_mesh_shape", None)
    across = getattr(resolved.partitioner, "dcn_mesh_shape", None)
    mesh = None if within is None else (math.prod(within), math.prod(across or [1]))
    return dataclasses.replace(request, mesh=mesh, resolved=resolved)


def _report(line: str) -> None:
    print(f"launch: {line}", file=sys.stderr)


def installed_runner() -> list[str]:
    """Return the words that call `runner` in the environment of this Python."""
    script = os.path.join(os.path.dirname(sys.executable), "runner")
    return [script] if os.access(script, os.X_OK) else [sys.executable, "-m", "layerkit_runner.cli"]


def check_words(words: Iterable[str]) -> None:
    """Raise UsageError if a word or the working directory holds a control character."""
    texts = [("working directory", os.getcwd())]
    for word in words:
        name, equals, text = word.partition("=")
        texts.append((name, text) if equals and name.isprintable() else ("argument", word))
    for name, text in texts:
        for character in text:
            if unicodedata.category(character) in _INVALID_CATEGORIES:
                raise UsageError(
                    field=name,
                    value=text,
                    expected="text without control characters",
                    hint=f"Remove {character!r}; inside a string of --fdl write it as an escape.",
                )


def check_dashes(options: Options) -> None:
    """Raise UsageError if a value begins with a dash, which would make it an option."""
    for name, value in vars(options).items():
        texts = value if isinstance(value, (list, tuple)) else [value]
        for text in texts:
            is_option = isinstance(text, str) and text.startswith("-")
            if is_option and name not in _MAY_BEGIN_WITH_DASH:
                raise UsageError(
                    field=f"--{name}",
                    value=text,
                    expected="a value that does not begin with a dash",
                    hint="Write a path as ./-NAME.",
                )


def read_variable(text: str) -> tuple[str, str | None]:
    """Return name and value of `NAME=VALUE`, or name and None of the reference `NAME`.

    Raises:
      UsageError: The text has another form, or is the value of a secret. The error does not repeat
        the value, since errors end up in logs.
    """
    name, equals, value = text.partition("=")
    if not _NAME.fullmatch(name):
        raise UsageError(field="--env", value=name, expected="NAME=VALUE or NAME")
    if equals and _SECRET_NAME.search(name):
        raise UsageError(
            "the value of a secret would be written to a file",
            field="--env",
            value=name,
            expected=f"a reference without the value, --env={name}",
            hint="docs/launch/README.md lists the source of the value for each kind of launcher.",
        )
    return name, value if equals else None


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Files and commands that start a run.

    Attributes:
      commands: Words of each command, in order.
      files: Text by path. Only the owner can read a file, and execute one that ends in `.sh`.
      folders: Folders that must exist.
      next_steps: Lines for the user, printed after the commands.
      replaces_process: True if the last command replaces this process and so receives its signals.
    """

    commands: Sequence[Sequence[str]]
    files: Mapping[str, str] = dataclasses.field(default_factory=dict)
    folders: Sequence[str] = ()
    next_steps: Sequence[str] = ()
    replaces_process: bool = False


def recipe_lines(recipe: Recipe) -> Iterator[str]:
    """Yield the lines of a dry run; except for the headings, a shell could run them."""
    for path, text in recipe.files.items():
        yield f"# would write {path}"
        yield text.rstrip("\n")
        yield ""
    for folder in recipe.folders:
        yield f"# would make {folder}"
    yield "# would run" if recipe.commands else "# would run nothing"
    for words in recipe.commands:
        yield shlex.join(words)
    yield from (f"# {line}" for line in recipe.next_steps)


def execute(recipe: Recipe) -> int:
    """Write the files and run the commands up to the first that fails; return its exit code.

    Raises:
      UsageError: A file cannot be written, or a program is not installed here.
    """
    try:
        for folder in recipe.folders:
            Path(folder).mkdir(parents=True, exist_ok=True)
        for path, text in recipe.files.items():
            # It may hold variables and paths that are not for others to read.
            atomic_write(path, text, mode=0o700 if path.endswith(".sh") else 0o600)
    except OSError as error:
        raise UsageError(f"cannot write, so nothing was started: {error}") from error
    for number, words in enumerate(recipe.commands, start=1):
        print(f"+ {shlex.join(words)}", flush=True)
        try:
            if recipe.replaces_process and number == len(recipe.commands):
                os.execvp(words[0], list(words))
            code = subprocess.run(words, check=False).returncode
        except FileNotFoundError:
            raise UsageError(
                "the program is not installed here, so nothing was started",
                owner=words[0],
                hint="--dry_run prints the files and commands, to start them on another machine.",
            ) from None
        if code != 0:
            return code
    for line in recipe.next_steps:
        print(line)
    return 0
