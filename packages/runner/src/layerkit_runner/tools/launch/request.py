"""The command that is launched, checked here before it waits in a queue for hours."""

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

# The launcher sets these itself.
_SET_BY_LAUNCHER = ("coordinator_address", "num_processes", "process_id", "multiprocess_gpu")

# Longest job name that Kubernetes, the strictest kind, accepts.
LONGEST_NAME = 40

_SET_THE_MESH = "set --fdl.partitioner.ici_mesh_shape and --fdl.partitioner.dcn_mesh_shape"


@dataclasses.dataclass(frozen=True)
class Request:
    """A checked command of `runner`, its folder absolute.

    Attributes:
      mesh: Number of devices of the mesh within a slice, and number of slices. None if any number
        of devices will do, or if the experiment could not be imported here.
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
        """Whether the folder is in a store, such as `gs://…`."""
        return "://" in self.folder

    def with_preset(self, preset: str | None, options: Options) -> Request:
        """Return the request with compiler flags, unless it has some or is not to have them."""
        has_some = self.options.xla_flags_preset is not None
        is_wanted = options.recommended_xla_flags and self.mode == "train"
        if preset is None or has_some or not is_wanted:
            return self
        words = (*self.words, f"--xla_flags_preset={preset}")
        return dataclasses.replace(self, words=words)

    def check_devices(self, count: int, flags: str, *, num_slices: int | None = None) -> None:
        """Raise a UsageError if the mesh has another number of devices than `flags` ask for.

        Args:
          count: Number of devices of the job.
          flags: The flags that ask for them, for the message.
          num_slices: Number of slices of TPUs; None for GPUs.
        """
        if self.mesh is None:
            return
        within, across = self.mesh
        if num_slices is not None and num_slices > 1:
            flags += f" --num_slices={num_slices}"
        to_do = f"{_SET_THE_MESH}, or the devices."
        if within * across != count:
            raise UsageError(
                f"{flags} make {count} devices, and the mesh of {self.experiment} has"
                f" {within * across}; {to_do}"
            )
        if num_slices is not None and num_slices != across:
            raise UsageError(
                f"{flags} make {num_slices} slice(s), and the mesh of {self.experiment} spans"
                f" {across}; {to_do}"
            )

    def check_cpus(self, num_processes: int, flags: str, variables: Mapping[str, str]) -> None:
        """Raise a UsageError if the mesh has more devices than so many processes on CPUs.

        A process on a CPU has one device, unless the `variables` of its environment say otherwise.
        """
        in_flags = "xla_force_host_platform_device_count" in variables.get("XLA_FLAGS", "")
        if self.mesh is None or in_flags or "JAX_NUM_CPU_DEVICES" in variables:
            return
        count = math.prod(self.mesh)
        if count > num_processes:
            raise UsageError(
                f"{flags} without GPUs or TPUs make {num_processes} device(s), and the mesh of"
                f" {self.experiment} has {count}; give --gpus_per_node, or {_SET_THE_MESH}."
            )


def make_request(words: Sequence[str], resolve: Resolve, *, runs_elsewhere: bool) -> Request:
    """Read and check the words of a command of `runner`.

    Args:
      words: The words after `runner`.
      resolve: Finds the experiment and applies the overrides.
      runs_elsewhere: Whether the run may see other files than this machine. Files and packages that
        are missing here are then reported, and are no error.

    Raises:
      UsageError: A flag, experiment, field or value is wrong, or nothing is launched in that mode.
    """
    flags = parse_flags(words)
    if flags.exp is None:
        flags = with_recorded_experiment(flags, _report)
    if flags.given.get("help") or flags.given.get("list") or flags.only_prints:
        raise UsageError("`runner launch` starts a run; this command only prints.")
    if flags.mode not in JOINING_MODES:
        raise UsageError(
            f"--mode={flags.mode} needs no launcher; those that do are {', '.join(JOINING_MODES)}."
        )
    for name in _SET_BY_LAUNCHER:
        if name in flags.given:
            raise UsageError(
                f"--{name}: the launcher tells each process which it is; leave it out."
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
        # What a validate() could not open here may well be there.
        if not runs_elsewhere or not isinstance(error.__cause__, (OSError, ImportError)):
            raise
        _report(f"not looked at any further here: {error}")
        return request
    return dataclasses.replace(request, mesh=mesh_devices(resolved), resolved=resolved)


def _report(line: str) -> None:
    print(f"launch: {line}", file=sys.stderr)


def mesh_devices(resolved: ResolvedExperiment) -> tuple[int, int] | None:
    """Return the devices within a slice, and the slices; None if the mesh takes all devices."""
    within = getattr(resolved.partitioner, "ici_mesh_shape", None)
    across = getattr(resolved.partitioner, "dcn_mesh_shape", None)
    if within is None:
        return None
    return math.prod(within), math.prod(across or [1])


def own_command() -> list[str]:
    """Return how the present Python calls `runner`."""
    beside = os.path.join(os.path.dirname(sys.executable), "runner")
    if os.access(beside, os.X_OK):
        return [beside]
    return [sys.executable, "-m", "layerkit_runner.cli"]


def split_command(text: str | None, default: list[str]) -> list[str]:
    """Return the words of `--runner`, or the default; an unmatched quote is a UsageError."""
    if text is None:
        return default
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"--runner={text}: expected a command. {error}.") from None
    if not words:
        raise UsageError("--runner is empty: expected a command, such as `python -m mine`.")
    return words
