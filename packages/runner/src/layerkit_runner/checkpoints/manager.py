"""Saves and restores training: state, input state and metadata of a step, together.

`CheckpointManager` is the whole contract of the runner with its storage. It hands the writing to
Orbax, asynchronously, and adds what Orbax leaves out: a manifest of checksums in every step (see
`integrity.py`), the single-file format (`formats.py`), one strict comparison of structures
(`structure.py`), and a line to the user about everything it cleans, passes over or moves aside.

    DIR/checkpoint_00000042/            a committed step
        state/  input_states/  metadata/  integrity/
    DIR/damaged_checkpoint_00000042/    moved aside, for people to look at and delete

Orbax is imported with the first save, restore or clean-up, not with this file: a new job can
import it in the background (`import orbax.checkpoint`) while its first step compiles.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from etils import epath

from layerkit_runner.checkpoints import folders, formats, integrity, structure
from layerkit_runner.checkpoints.formats import StateFormat
from layerkit_runner.checkpoints.policy import CheckpointPolicy, SavedStep

if TYPE_CHECKING:
    import orbax.checkpoint as ocp

_LOG = logging.getLogger(__name__)

# Raised when the files of a step, the names in them or the metadata change their meaning.
LAYOUT_VERSION = 1

_NO_STEP, _FAILED = -1, -2  # what process 0 tells the others instead of a step


class DamagedCheckpointError(RuntimeError):
    """The files of a step are not as they were written. The message lists them."""


class LayoutVersionError(ValueError):
    """A checkpoint was written by a later version of this package."""


@dataclasses.dataclass(frozen=True)
class RestoredCheckpoint:
    """What a step held.

    Attributes:
      state: the tree of the target, with `jax.Array` leaves under the target's shardings.
      input_states: this process's input states by input name.
      metadata: what the writer passed to `save`.
      state_format: how the state was stored.
    """

    state: Any
    input_states: Mapping[str, Any]
    metadata: Mapping[str, Any]
    state_format: StateFormat


class CheckpointManager:
    """Writes and reads the checkpoints of one folder.

    All processes of a job make one and call its methods alike. Saves run in the background, one
    at a time; an error in one is raised by the next call that waits. Close it, or use it as a
    context manager, so that the last save is complete.

    Args:
      directory: the folder of the checkpoints; local, or a store that epath knows (`gs://…`).
        Made by the first save.
      policy: when to save and what to keep.
      state_format: how to write the state. Both formats are read, whatever this says.
      async_timeout_secs: how long processes wait for each other in a save, in seconds.
      read_only: only read, as evaluation beside a training job does: nothing is cleaned or moved.
      report: takes what the user must know, a line or a few at a time.
    """

    def __init__(
        self,
        directory: epath.PathLike,
        *,
        policy: CheckpointPolicy | None = None,
        state_format: StateFormat = StateFormat.TENSORSTORE,
        async_timeout_secs: int = 600,
        read_only: bool = False,
        report: Callable[[str], None] = _LOG.warning,
    ):
        if async_timeout_secs < 1:
            raise ValueError(f"async_timeout_secs is {async_timeout_secs}; expected at least 1.")
        self._directory = folders.absolute(directory)
        self._policy = policy if policy is not None else CheckpointPolicy()
        self._state_format = state_format
        self._async_timeout_secs = async_timeout_secs
        self._read_only = read_only
        self._report = report
        self._orbax: ocp.CheckpointManager | None = None
        self._sound: set[int] = set()
        if not read_only:
            self._clean_unfinished()
        self._last_saved = self.latest_step()

    @property
    def directory(self) -> epath.Path:
        """The folder of the checkpoints."""
        return self._directory

    def should_save(self, step: int) -> bool:
        """Says whether the policy wants a checkpoint at `step`; never when read-only."""
        return not self._read_only and self._policy.should_save(step, last_saved=self._last_saved)

    def save(
        self,
        step: int,
        state: Any,
        *,
        input_states: Mapping[str, Any],
        metadata: Mapping[str, Any],
        force: bool = False,
    ) -> bool:
        """Starts to save a step; returns once the state is copied and may be donated.

        Args:
          step: the training step, the number of updates that `state` has had.
          state: any tree of `jax.Array`.
          input_states: by input name, where this process stands in each input, as JSON values. A
            state with `"scope": "global"` is good for any number of processes.
          metadata: JSON values to keep beside, such as versions and the configuration.
          force: save although no checkpoint is due, as at the end or on preemption.

        Returns:
          Whether a save was started: False if none is due, or the step is saved already.

        Raises:
          PermissionError: if the manager is read-only.
          Exception: what made the save before this one fail, whatever it was.
          TypeError: if something cannot be stored, naming it.
          ValueError: if the format does not fit the state, naming the leaves.
        """
        if self._read_only:
            raise PermissionError(f"{self._directory} was opened read-only; step {step} not saved.")
        if not (force or self.should_save(step)):
            return False
        self.wait_until_finished()
        if step == self._last_saved or step in folders.committed_steps(self._directory):
            return False
        leaves = structure.named_leaves(state)
        structure.check_storable(leaves)
        if self._state_format is StateFormat.MSGPACK:
            formats.check_replicated(leaves)
        about = {
            "layout_version": LAYOUT_VERSION,
            "state_format": self._state_format.value,
            "process_count": jax.process_count(),
            "user": json.loads(_to_json(metadata, name="metadata")),
        }
        inputs = _to_json(input_states, name="input_states")

        import orbax.checkpoint as ocp

        from layerkit_runner.checkpoints import handlers

        items = ocp.args.Composite(
            state=handlers.StateSave(leaves, self._state_format),
            input_states=handlers.ProcessJsonSave(inputs),
            metadata=ocp.args.JsonSave(about),
            integrity=handlers.ManifestSave(),
        )
        self._storage().save(step, args=items, force=True)
        self._last_saved = step
        return True

    def latest_step(self) -> int | None:
        """Returns the newest committed step, sound or not; None if there is none."""
        return max(folders.committed_steps(self._directory), default=None)

    def newest_sound_step(self) -> int | None:
        """Returns the newest step whose files are as they were written; None if there is none.

        Reads those files in full. Every newer step is reported with its damage and, unless
        read-only, moved aside, so that it blocks neither the policy nor a new save of the step.

        Raises:
          NewerManifestError: if a later version of this package wrote the newest step.
        """
        self.wait_until_finished()
        step = _on_first_process(self._pass_over_damaged)
        if not self._read_only:
            self._last_saved = step
            if self._orbax is not None:
                self._orbax.reload()
        if step is not None:
            self._sound.add(step)
        return step

    def restore(self, step: int, target: Any) -> RestoredCheckpoint:
        """Reads a step, placing its arrays where the target's shardings say.

        The mesh, the number of devices and the format may all differ from those of the save.

        Args:
          step: a committed step.
          target: the tree to fill, of `jax.ShapeDtypeStruct` with shardings.

        Raises:
          FileNotFoundError: if there is no such step, naming those that there are.
          DamagedCheckpointError: if its files are not as they were written.
          LayoutVersionError: if a later version of this package wrote it.
          StructureMismatchError: if names, shapes or dtypes differ, listing all differences.
          ProcessCountError: if the input state belongs to another number of processes.
        """
        self.wait_until_finished()
        _on_first_process(lambda: self._require_sound(step))
        self._sound.add(step)
        path = folders.step_folder(self._directory, step)
        about = _read_metadata(path)

        import orbax.checkpoint as ocp

        from layerkit_runner.checkpoints import handlers

        targets = structure.named_leaves(target)
        structure.check_target(targets)
        state_format = formats.format_of(path / "state")
        stored = handlers.stored_leaves(path / "state")
        structure.check_match(stored, targets, where=f"The checkpoint {path}")
        items = ocp.args.Composite(
            state=handlers.StateRestore(targets), input_states=handlers.ProcessJsonRestore()
        )
        restored = self._storage().restore(step, args=items)
        state = jax.tree.unflatten(
            jax.tree.structure(target), [restored.state[leaf] for leaf in targets]
        )
        return RestoredCheckpoint(state, restored.input_states, about["user"], state_format)

    def wait_until_finished(self) -> None:
        """Blocks until the save in progress is committed; raises its error if it failed.

        The error is raised once. The failed step may then be saved again.
        """
        if self._orbax is None:
            return
        try:
            self._orbax.wait_until_finished()
        except Exception:
            self._orbax = None  # Orbax would raise the same error for ever
            self._last_saved = self.latest_step()
            raise

    def close(self) -> None:
        """Completes the save in progress and releases all threads."""
        self.wait_until_finished()
        if self._orbax is not None:
            self._orbax.close()
            self._orbax = None

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _storage(self) -> ocp.CheckpointManager:
        """Returns Orbax's manager, made when first needed."""
        if self._orbax is None:
            import orbax.checkpoint as ocp

            from layerkit_runner.checkpoints import handlers

            options = ocp.CheckpointManagerOptions(
                step_name_format=ocp.path.step.standard_name_format(
                    step_prefix=folders.STEP_PREFIX, step_format_fixed_length=folders.STEP_DIGITS
                ),
                preservation_policy=_Preservation(self._policy),
                create=not self._read_only,
                async_options=ocp.AsyncOptions(timeout_secs=self._async_timeout_secs),
            )
            self._orbax = ocp.CheckpointManager(
                self._directory, options=options, handler_registry=handlers.item_registry()
            )
        return self._orbax

    def _clean_unfinished(self) -> None:
        """Deletes what killed saves left behind."""
        left_over = folders.unfinished(self._directory)
        if left_over and jax.process_index() == 0:
            for path in left_over:
                path.rmtree()
                self._report(f"Deleted the unfinished checkpoint {path}, left by a killed save.")

    def _pass_over_damaged(self) -> int | None:
        chosen = integrity.newest_sound(folders.committed_steps(self._directory), self._findings)
        for step, findings in chosen.damaged.items():
            path = folders.step_folder(self._directory, step)
            if not path.exists():  # deleted by the job that owns the folder, while we read it
                continue
            message = integrity.damage_message(
                step, findings, directory=path, used_instead=chosen.step
            )
            if not self._read_only:
                message += f"\n  It was moved aside to {folders.move_aside(path).name}."
            self._report(message)
        return chosen.step

    def _findings(self, step: int) -> Sequence[integrity.Finding]:
        if step in self._sound:
            return ()
        path = folders.step_folder(self._directory, step)
        findings = integrity.verify(path)
        for finding in findings:
            if not finding.is_damage:
                self._report(
                    f"{path / finding.file} is not part of the checkpoint as it was saved; it is "
                    "ignored."
                )
        return findings

    def _require_sound(self, step: int) -> int:
        steps = folders.committed_steps(self._directory)
        if step not in steps:
            raise FileNotFoundError(
                f"{self._directory} has no checkpoint of step {step}; it has "
                f"{', '.join(map(str, steps)) or 'none'}."
            )
        damage = [finding for finding in self._findings(step) if finding.is_damage]
        if damage:
            raise DamagedCheckpointError(
                f"The checkpoint {folders.step_folder(self._directory, step)} is damaged:\n  "
                + "\n  ".join(map(str, damage))
                + "\nnewest_sound_step() names the newest step that can be restored."
            )
        return step


@dataclasses.dataclass(frozen=True)
class _Preservation:
    """Lets Orbax ask our policy which steps stay."""

    policy: CheckpointPolicy

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        del context
        saved = [SavedStep(checkpoint.step, checkpoint.time) for checkpoint in checkpoints]
        keep = self.policy.steps_to_keep(saved)
        return [checkpoint.step in keep for checkpoint in checkpoints]


def _read_metadata(path: epath.Path) -> Mapping[str, Any]:
    about = json.loads((path / "metadata" / "metadata.json").read_text())
    if about["layout_version"] > LAYOUT_VERSION:
        raise LayoutVersionError(
            f"The checkpoint {path} has layout version {about['layout_version']}; this version of "
            f"layerkit-runner reads up to {LAYOUT_VERSION}. Use the newer version that wrote it."
        )
    return about


def _to_json(value: Mapping[str, Any], *, name: str) -> str:
    """Renders at once, so that a mistake is the caller's and later changes do no harm."""
    try:
        return json.dumps(dict(value))
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{name} must be JSON values (dict, list, str, int, float): {error}."
        ) from error


def _on_first_process(choose: Callable[[], int | None]) -> int | None:
    """Lets process 0 choose a step for all: reading it once is enough, and all must agree."""
    if jax.process_count() == 1:
        return choose()
    from jax.experimental import multihost_utils

    chosen: int | None = None
    error: Exception | None = None
    if jax.process_index() == 0:
        try:
            chosen = choose()
        except Exception as caught:  # the others wait for an answer in any case
            error = caught
    code = _FAILED if error is not None else _NO_STEP if chosen is None else chosen
    shared = int(multihost_utils.broadcast_one_to_all(np.int32(code)))
    if error is not None:
        raise error
    if shared == _FAILED:
        raise RuntimeError("Process 0 could not read the checkpoints; its own error says why.")
    return None if shared == _NO_STEP else shared
