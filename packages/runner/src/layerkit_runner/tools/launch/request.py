"""The launched command of `runner`, checked before it waits in a queue for hours."""

from __future__ import annotations

import dataclasses
import math
import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from layerkit_runner.config.flags import ParsedFlags, flag_word, parse_flags
from layerkit_runner.config.recorded import with_recorded_experiment
from layerkit_runner.errors import UsageError
from layerkit_runner.run_options import JOINING_MODES, RunOptions
from layerkit_runner.tools.launch.values import Options

if TYPE_CHECKING:
    from layerkit_runner.config.resolve import ResolvedExperiment

Resolve = Callable[[ParsedFlags], "ResolvedExperiment"]

# Longest job name that Kubernetes, the strictest kind, accepts.
LONGEST_NAME = 40

_SET_BY_LAUNCHER = ("coordinator_address", "num_processes", "process_id", "multiprocess_gpu")
_MESH_SETTINGS = {"partitioner.ici_mesh_shape": "…", "partitioner.dcn_mesh_shape": "…"}


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
    return dataclasses.replace(request, mesh=_mesh_devices(resolved), resolved=resolved)


def _report(line: str) -> None:
    print(f"launch: {line}", file=sys.stderr)


def _mesh_devices(resolved: ResolvedExperiment) -> tuple[int, int] | None:
    """Return the devices within a slice, and the slices; None if the mesh takes all devices."""
    within = getattr(resolved.partitioner, "ici_mesh_shape", None)
    across = getattr(resolved.partitioner, "dcn_mesh_shape", None)
    return None if within is None else (math.prod(within), math.prod(across or [1]))


def installed_runner() -> list[str]:
    """Return the words that call `runner` in the environment of this Python."""
    script = os.path.join(os.path.dirname(sys.executable), "runner")
    return [script] if os.access(script, os.X_OK) else [sys.executable, "-m", "layerkit_runner.cli"]


def split_command(text: str | None, default: list[str]) -> list[str]:
    """Return the words of `--runner`, or the default; raise UsageError if it is no command."""
    if text is None:
        return default
    try:
        words = shlex.split(text)
    except ValueError:  # an unmatched quote
        words = []
    if not words:
        expected = "a command, such as `python -m mine`"
        raise UsageError(field="--runner", value=text, expected=expected)
    return words
