"""One of our checkpoints, read by name: any of its values, placed as they are wanted."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
from etils import epath

from layerkit_runner.checkpointing import (
    CheckpointManager,
    DamagedCheckpointError,
    LayoutVersionError,
    StateFormat,
    documents,
)
from layerkit_runner.checkpointing.folders import committed_steps, step_folder
from layerkit_runner.checkpointing.formats import check_decoded_sizes, format_of
from layerkit_runner.checkpointing.integrity import verify_together
from layerkit_runner.checkpointing.structure import LeafPath, LeafSpec
from layerkit_runner.distributed.process_exchange import from_each_process
from layerkit_runner.errors import UsageError, first_names


class StoredCheckpoint:
    """A checkpoint of either format, of a run under any partitioner.

    Attributes:
      label: `DIR:STEP`, for messages and records.
      step: Of the checkpoint.
      leaves: Shape and dtype of every value by its path, such as `("params", "lm", "w")`.
    """

    def __init__(
        self, directory: epath.Path, *, step: int | None, report: Callable[[str], None]
    ) -> None:
        """Looks for a sound checkpoint; reads names alone.

        Args:
          directory: Of the checkpoints.
          step: Which; None for the newest sound one.
          report: Takes a line about newer ones that are damaged.

        Raises:
          UsageError: there is none, that of `step` is damaged, or a later version wrote it.
        """
        self.step = _choose(directory, step, report)
        self.label = f"{directory}:{self.step}"
        self._state = step_folder(directory, self.step) / "state"
        try:
            documents.read(self._state.parent)
        except LayoutVersionError as error:
            raise UsageError(str(error)) from error
        # Orbax takes most of a second to import.
        from layerkit_runner.checkpointing import handlers

        self.leaves: Mapping[LeafPath, LeafSpec] = handlers.stored_leaves(self._state)

    def read(self, wanted: Mapping[LeafPath, jax.ShapeDtypeStruct]) -> dict[LeafPath, jax.Array]:
        """Some of the values, each under the sharding that is wanted.

        Only what the devices of a process hold is read by it; a single file (`StateFormat.MSGPACK`)
        is passed through one value at a time.

        Args:
          wanted: Stored shape and dtype, with a sharding.

        Raises:
          UsageError: A chunk would decompress to more than its array holds.
        """
        from layerkit_runner.checkpointing import handlers

        if format_of(self._state) is StateFormat.TENSORSTORE:
            own = list(wanted)[jax.process_index() :: jax.process_count()]
            chosen = {path: self.leaves[path] for path in own}
            try:
                from_each_process(lambda: check_decoded_sizes(self._state, chosen))
            except DamagedCheckpointError as error:
                raise UsageError(str(error)) from error
        handler = handlers.StateHandler()
        try:
            return handler.restore(self._state, handlers.StateRestore(wanted))
        finally:
            handler.close()


def _choose(directory: epath.Path, step: int | None, report: Callable[[str], None]) -> int:
    if step is None:
        with CheckpointManager(directory, read_only=True, report=report) as checkpoints:
            step = checkpoints.newest_sound_step()
        if step is None:
            raise UsageError(f"no checkpoint in {directory} is sound")
        return step
    steps = committed_steps(directory)
    if step not in steps:
        raise UsageError(
            f"{directory} has no checkpoint of step {step}; it has {first_names(map(str, steps))}"
        )
    findings = verify_together(step_folder(directory, step))
    damage = [str(finding) for finding in findings if finding.is_damage]
    if damage:
        raise UsageError(f"{step_folder(directory, step)} is damaged: {first_names(damage)}")
    return step
