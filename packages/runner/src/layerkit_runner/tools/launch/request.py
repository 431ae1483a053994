"""What is to be started somewhere else, checked here, before it waits in a queue for hours."""

from __future__ import annotations

import dataclasses
import math
import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from layerkit_runner.config.flags import FLAGS, ParsedFlags, RunOptions, parse_flags
from layerkit_runner.config.recorded import with_recorded_experiment
from layerkit_runner.errors import UsageError
from layerkit_runner.run_options import JOINING_MODES
from layerkit_runner.tools.launch.data_fields import unset_data_fields

if TYPE_CHECKING:
    from layerkit_runner.config.resolve import ResolvedExperiment

Resolve = Callable[[ParsedFlags], "ResolvedExperiment"]

# A launcher tells the processes itself.
_TOLD_BY_LAUNCHER = ("coordinator_address", "num_processes", "process_id", "multiprocess_gpu")

_SET_THE_MESH = "set --fdl.ICI_MESH_SHAPE and --fdl.DCN_MESH_SHAPE"

# What a job name may hold everywhere; Kubernetes is the strictest.
LONGEST_NAME = 40


@dataclasses.dataclass(frozen=True)
class Request:
    """A command of `runner` that makes sense.

    Attributes:
      words: Those after `runner`, the folder absolute.
      options: What they say.
      mode: What `--mode` says.
      experiment: The name of the experiment, as `--list` shows it.
      mesh: How many devices its mesh has within a slice, and how many slices; None where any
        number will do, or where the experiment could not be looked at.
      unset_data: The fields that say where its data are, and do not.
    """

    words: tuple[str, ...]
    options: RunOptions
    mode: str
    experiment: str
    mesh: tuple[int, int] | None = None
    unset_data: tuple[str, ...] = ()

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

    def with_preset(self, preset: str | None) -> Request:
        """The same with a set of compiler flags, unless the command names one or does not train."""
        if preset is None or self.mode != "train" or self.options.xla_flags_preset is not None:
            return self
        options = dataclasses.replace(self.options, xla_flags_preset=preset)
        words = (*self.words, f"--xla_flags_preset={preset}")
        return dataclasses.replace(self, options=options, words=words)

    def check_devices(self, count: int, told_by: str, *, num_slices: int | None = None) -> None:
        """Refuses a number of devices that the mesh does not have.

        Args:
          count: How many there will be in all.
          told_by: The flags that say so, for the message.
          num_slices: Among how many slices of TPUs; None for GPUs, whose nodes are no slices.

        Raises:
          UsageError: names both numbers.
        """
        if self.mesh is None:
            return
        within, across = self.mesh
        to_do = f"{_SET_THE_MESH}, or the devices."
        if within * across != count:
            raise UsageError(
                f"{told_by} make {count} devices, and the mesh of {self.experiment} has"
                f" {within * across}; {to_do}"
            )
        if num_slices is not None and num_slices != across:
            raise UsageError(
                f"{told_by} make {num_slices} slice(s), and the mesh of {self.experiment} spans"
                f" {across}; {to_do}"
            )

    def check_cpus(self, num_processes: int, told_by: str, variables: Mapping[str, str]) -> None:
        """Refuses a mesh of more devices than there are where no accelerators are asked for.

        A process without them has one device, unless `variables` say that its CPU is to be more.

        Args:
          num_processes: How many there will be in all.
          told_by: The flags that say so, for the message.
          variables: Of the run's environment.

        Raises:
          UsageError: names both numbers.
        """
        if self.mesh is None or _has_several_cpu_devices(variables):
            return
        count = math.prod(self.mesh)
        if count > num_processes:
            raise UsageError(
                f"{told_by} without GPUs or TPUs make {num_processes} device(s), and the mesh of"
                f" {self.experiment} has {count}; give --gpus_per_node, or {_SET_THE_MESH}."
            )


def make_request(words: Sequence[str], resolve: Resolve, *, runs_elsewhere: bool) -> Request:
    """Reads and checks the words of a command of `runner`.

    Args:
      words: Those after `runner`.
      resolve: Finds the experiment and applies the overrides.
      runs_elsewhere: Whether it will run on machines that may see other files than this one; then
        files and packages that are missing here are only told.

    Raises:
      UsageError: a wrong flag, experiment, field or value; a mode that nothing is started for.
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
    for name in _TOLD_BY_LAUNCHER:
        if name in flags.given:
            raise UsageError(
                f"--{name}: the launcher tells each process which it is; leave it out."
            )
    folder = flags.options.job_log_dir
    if folder is not None and "://" not in folder:
        folder = os.path.abspath(os.path.expanduser(folder))
    given = {**flags.given, "job_log_dir": folder} if folder is not None else flags.given
    flags = dataclasses.replace(
        flags, given=given, options=dataclasses.replace(flags.options, job_log_dir=folder)
    )
    mesh = None
    unset: tuple[str, ...] = ()
    try:
        resolved = resolve(flags)
        mesh, unset = mesh_devices(resolved), unset_data_fields(resolved.experiment)
    except UsageError as error:
        # What a validate() could not open here may well be there.
        if not runs_elsewhere or not isinstance(error.__cause__, (OSError, ImportError)):
            raise
        print(f"launch: not looked at any further here: {error}", file=sys.stderr)
    return Request(_words(flags), flags.options, flags.mode, flags.exp or "", mesh, unset)


def _report(line: str) -> None:
    print(f"launch: {line}", file=sys.stderr)


def mesh_devices(resolved: ResolvedExperiment) -> tuple[int, int] | None:
    """Devices within a slice, and slices; None where the mesh takes the devices that there are."""
    within = getattr(resolved.partitioner, "ici_mesh_shape", None)
    across = getattr(resolved.partitioner, "dcn_mesh_shape", None)
    if within is None:
        return None
    return math.prod(within), math.prod(across or [1])


def _has_several_cpu_devices(variables: Mapping[str, str]) -> bool:
    in_flags = "xla_force_host_platform_device_count" in variables.get("XLA_FLAGS", "")
    return in_flags or "JAX_NUM_CPU_DEVICES" in variables


def _words(flags: ParsedFlags) -> tuple[str, ...]:
    """The command again, every flag as `--name=value`."""
    kinds = {flag.name: flag for flag in FLAGS}
    words = [f"--exp={flags.exp}"]
    words += [f"--fdl.{override.path}={override.text}" for override in flags.overrides]
    for name, value in flags.given.items():
        if name not in ("exp", "fdl_config"):
            words.append(_word(name, value, is_switch=kinds[name].is_switch))
    return tuple(words)


def _word(name: str, value: Any, *, is_switch: bool) -> str:
    if is_switch:
        return f"--{name}" if value else f"--no{name}"
    if value is None:
        return f"--{name}=off"
    if isinstance(value, tuple):
        return f"--{name}={','.join(map(str, value))}"
    return f"--{name}={value}"


def own_command() -> list[str]:
    """How `runner` is called by the Python that runs now."""
    beside = os.path.join(os.path.dirname(sys.executable), "runner")
    if os.access(beside, os.X_OK):
        return [beside]
    return [sys.executable, "-m", "layerkit_runner.cli"]


def split_command(text: str | None, default: list[str]) -> list[str]:
    """Return the words of `--runner`, or the default where it is None.

    Raises:
      UsageError: The text is no command, as of an unmatched quote.
    """
    if text is None:
        return default
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"--runner={text}: expected a command. {error}.") from None
    if not words:
        raise UsageError("--runner is empty: expected a command, such as `python -m mine`.")
    return words
