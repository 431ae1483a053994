"""Manager that saves and restores the state, input states and metadata of training steps.

It adds to Orbax a manifest of checksums in every step (`integrity.py`), a single-file format and a
strict comparison of structures on restore (`stored_state.py`), and messages about all files that it
deletes or moves.

    DIR/checkpoint_00000042/            a committed step
        state/  input_states/  metadata/  integrity/
    DIR/damaged_checkpoint_00000042/    a damaged step, moved aside for inspection
    DIR/abandoned_checkpoint_00000043/  a step after the one to which the run was rolled back
    DIR/evaluations.json                recorded evaluations of the saved steps

The first save or restore imports Orbax; a new job can do so while its first step compiles.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from typing import TYPE_CHECKING, Any

import jax
from etils import epath

from layerkit_runner.checkpointing import folders, integrity, stored_state
from layerkit_runner.checkpointing.errors import (
    STORAGE_ERRORS,
    SaveError,
    save_error,
    silence_tracebacks,
)
from layerkit_runner.checkpointing.policy import (
    CheckpointPolicy,
    Evaluations,
    read_evaluations,
    write_evaluations,
)
from layerkit_runner.checkpointing.stored_state import RestoredCheckpoint, StateFormat
from layerkit_runner.distributed.cluster import gather_results, run_on_process_0
from layerkit_runner.errors import NonFiniteError
from layerkit_runner.files.atomic_write import absolute

if TYPE_CHECKING:
    import orbax.checkpoint as ocp

_LOG = logging.getLogger(__name__)

_POLL_SECONDS = 0.005
# Orbax has the same time limit and a more precise error, so it gets one more second to raise it.
_DEADLINE_GRACE_SECONDS = 1.0


class CheckpointManager:
    """A writer and reader of the checkpoints of one folder.

    Every process of a job creates a manager and calls its methods in the same order. Saves run in
    the background, one at a time. The next call that waits for a save raises its error. Close the
    manager, or use it as a context manager, so that the last save is completed.

    Args:
      directory: Folder of the checkpoints, which the first save creates.
      policy: Policy that determines which steps are saved and kept; None for the default policy.
      state_format: Format of new checkpoints. Both formats are read.
      async_timeout_secs: Time limit of a save, in seconds.
      todelete_subdir: Folder to which steps that are no longer kept are moved; None deletes them.
      read_only: True if this manager must not write, delete or move files.
      report: Function that receives messages for the user.
      on_commit: Function that process 0 calls with each committed step, unless `read_only` is set.

    Raises:
      SaveError: The unfinished folder of a killed save cannot be deleted.
    """

    def __init__(
        self,
        directory: epath.PathLike,
        *,
        policy: CheckpointPolicy | None = None,
        state_format: StateFormat = StateFormat.TENSORSTORE,
        async_timeout_secs: int = 600,
        todelete_subdir: str | None = None,
        read_only: bool = False,
        report: Callable[[str], None] = _LOG.warning,
        on_commit: Callable[[int], None] | None = None,
    ):
        """Open the folder and, unless `read_only` is set, delete the folders of killed saves."""
        self._directory = absolute(directory)
        self._policy = policy if policy is not None else CheckpointPolicy()
        self._state_format = state_format
        self._async_timeout_secs = async_timeout_secs
        self._todelete_subdir = todelete_subdir
        self._read_only = read_only
        self._report = report
        self._on_commit = None if read_only else on_commit
        self._step_in_progress: int | None = None
        self._check: stored_state.FiniteCheck | None = None  # of the save in progress
        self._orbax: ocp.CheckpointManager | None = None
        self._sound: set[int] = set()
        self._deadline = 0.0  # time.monotonic() at which the save in progress is overdue
        self._evaluations: Evaluations = {}
        if not read_only:
            self._evaluations.update(read_evaluations(self._directory))
            left_over = folders.unfinished(self._directory)
            # `jax.process_index` starts JAX, so it is called only if there is a folder to delete.
            for path in left_over if left_over and jax.process_index() == 0 else ():
                killed = f"the unfinished checkpoint {path} of a killed save"
                try:
                    path.rmtree()
                except OSError as error:
                    raise SaveError(f"cannot delete {killed}: {error}.") from error
                report(f"Deleted {killed}.")
        self._last_saved = self.latest_step()

    @property
    def directory(self) -> epath.Path:
        """Return the folder of the checkpoints."""
        return self._directory

    def should_save(self, step: int) -> bool:
        """Return whether a checkpoint is due at `step`; always False if read-only."""
        self._raise_nonfinite()
        if self._orbax is not None and (
            self._is_overdue() or not self._orbax.is_saving_in_progress()
        ):
            # This returns at once. Orbax raises the errors of a finished save only in this call.
            self.wait_until_finished()
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
        """Start to save a step; return once the state is copied and may be donated.

        During the save, the devices check that the state is finite. If it is not, the step is never
        committed, and the next call of `should_save`, `save`, `wait_until_finished` or `close`
        raises NonFiniteError on every process. Steps committed before are kept.

        Args:
          step: Number of updates that `state` has had.
          state: Any tree of `jax.Array`.
          input_states: Input states of this process by input name, as JSON values. A state with
            `"scope": "global"` is valid for any number of processes.
          metadata: JSON values to store, such as versions and the configuration.
          force: True to save even if no checkpoint is due.

        Returns:
          True if a save was started; False if none is due, or the step is already saved.

        Raises:
          NonFiniteError: The state of the previous save was not finite.
          SaveError: The previous save failed, or this one cannot be started.
          TypeError: A leaf, input state or metadata value cannot be stored.
        """
        if self._read_only:
            raise PermissionError(f"{self._directory} is open read-only; cannot save step {step}.")
        if not (force or self.should_save(step)):
            return False
        self.wait_until_finished()
        if step == self._last_saved or step in folders.committed_steps(self._directory):
            return False
        leaves = stored_state.named_leaves(state)
        stored_state.check_storable(leaves)
        about = folders.make_metadata(
            metadata,
            state_format=self._state_format.value,
            process_count=jax.process_count(),
            policy=self._policy,
        )
        # Both are text, so that later changes of the values are not saved.
        inputs = json.dumps(dict(input_states))

        import orbax.checkpoint as ocp

        from layerkit_runner.checkpointing import handlers

        check: futures.Future[stored_state.FiniteCheck] = futures.Future()
        content = handlers.StepSave(leaves, self._state_format, about, inputs, check)
        try:
            self._last_saved = step
            # Evaluations are written before the step, so that a kill leaves no step without them.
            self._write_evaluations()
            if self._orbax is None:
                silence_tracebacks()
                self._orbax = handlers.orbax_manager(
                    self._directory,
                    self._policy,
                    self._evaluations,
                    timeout_secs=self._async_timeout_secs,
                    todelete_subdir=self._todelete_subdir,
                )
            self._deadline = time.monotonic() + self._async_timeout_secs
            self._orbax.save(step, args=ocp.args.Composite(state=content), force=True)
            # The check starts behind the copy to the host, which would otherwise wait for it, and
            # before the caller can donate the arrays.
            self._check = stored_state.FiniteCheck(leaves)
            check.set_result(self._check)
            self._step_in_progress = step
        except Exception as error:
            problem = self._discard_failed_save(error)
            if isinstance(error, STORAGE_ERRORS):
                raise problem from error
            raise
        finally:
            check.cancel()  # A save without a check is not committed.
        return True

    def record_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record metrics by `DATASET/METRIC` of a step that is or will be saved."""
        known = self._evaluations.get(step, {})
        if {**known, **metrics} == known:
            return  # for example because a finished run was started again
        self._evaluations[step] = {**known, **metrics}
        if self._read_only or step != self._last_saved:
            return
        try:
            self._write_evaluations()
        except OSError as error:
            problem = f"The evaluation of step {step} could not be written to {self._directory}"
            raise SaveError(f"{problem}: {error}.") from error

    def latest_step(self) -> int | None:
        """Return the newest committed step, which may be damaged; None if there is none."""
        return max(folders.committed_steps(self._directory), default=None)

    def newest_sound_step(self) -> int | None:
        """Return the newest step whose files are undamaged; None if there is none.

        Each process reads a share of the files. Newer, damaged steps are reported and, unless
        read-only, moved aside. They then neither count for the policy nor prevent a new save of the
        step. If all steps are damaged, none is moved.
        """
        return self._newest_sound(None)[0]

    def restore_newest(self, target: Any, **options: Any) -> RestoredCheckpoint | None:
        """Restore the newest undamaged step, if any; see `newest_sound_step` and `restore`."""
        return self._newest_sound(target, **options)[1]

    def _newest_sound(
        self, target: Any, **options: Any
    ) -> tuple[int | None, RestoredCheckpoint | None]:
        """Return the newest undamaged step and its content; read no content without a target."""
        self.wait_until_finished()
        # The record is read first, since the job that owns the folder may commit a step meanwhile.
        recorded, listed = run_on_process_0(
            lambda: (
                folders.recorded_step(self._directory),
                folders.committed_steps(self._directory),
            )
        )
        damaged: dict[int, Sequence[integrity.Finding]] = {}
        newest, content = None, None
        for step in reversed(listed):
            findings, content = self._read(step, target, **options)
            if not any(finding.is_damage for finding in findings):
                newest = step
                break
            damaged[step] = findings
        run_on_process_0(lambda: self._report_missing(recorded, listed, used_instead=newest))
        run_on_process_0(lambda: self._move_damaged(listed, damaged, used_instead=newest))
        if not self._read_only:
            older = [step for step in listed if step < (newest or 0)]
            run_on_process_0(lambda: self._move_irregular(older))
            self._last_saved = newest
            if self._orbax is not None:
                self._orbax.reload()
        if newest is not None:
            self._sound.add(newest)
            self._announce_commit(newest)
        return newest, content

    def abandon_from(self, step: int) -> None:
        """Move aside the steps that a rollback abandons, so that it restores the newest one left.

        It goes back to the newest step before `step` that was due by the policy, or to the oldest
        one. Steps that were saved for another reason, such as a signal, do not change the choice.
        """
        self.wait_until_finished()

        def move() -> int:
            steps = folders.committed_steps(self._directory)
            before = [one for one in steps if one < step]
            due = [one for one in before if self._policy.should_save(one, last_saved=None)]
            newest = max(due, default=min(before, default=step))
            for later in (one for one in steps if one > newest):
                path = folders.step_folder(self._directory, later)
                aside = folders.move_aside(path, reason="abandoned").name
                self._report(f"Moved {path} aside to {aside}, since the run is rolled back.")
            return newest

        newest = run_on_process_0(move)
        for later in [one for one in self._evaluations if one > newest]:
            del self._evaluations[later]

    def restore(
        self,
        step: int,
        target: Any,
        *,
        leave_out: Sequence[str] = (),
        cast_dtypes: bool = False,
        with_input_states: bool = True,
    ) -> RestoredCheckpoint:
        """Restore a step, with the shardings of the target.

        The mesh, the number of devices and the format may differ from those of the saving job.

        Args:
          step: Step to restore.
          target: Tree of `jax.ShapeDtypeStruct` with shardings.
          leave_out: Parts of the stored state that the target does not have, such as `opt_state`;
            their arrays are not read.
          cast_dtypes: True to convert floating-point numbers to the target's dtypes. Conversions
            are reported.
          with_input_states: True to read the input states. False allows a restore with any number
            of processes.

        Raises:
          FileNotFoundError: The step does not exist.
          DamagedCheckpointError: Files of the step are damaged.
          LayoutVersionError: A later version of this package wrote the step.
          StructureMismatchError: Names, shapes or dtypes differ from those of the target.
          ProcessCountError: The input states require the number of processes that saved them.
        """
        self.wait_until_finished()
        steps = run_on_process_0(lambda: folders.committed_steps(self._directory))
        if step not in steps:
            raise FileNotFoundError(
                f"{self._directory} has no checkpoint of step {step}. Steps: "
                f"{', '.join(map(str, steps)) or 'none'}."
            )
        findings, content = self._read(
            step,
            target,
            leave_out=leave_out,
            cast_dtypes=cast_dtypes,
            with_input_states=with_input_states,
        )
        integrity.require_sound(folders.step_folder(self._directory, step), findings)
        assert content is not None
        self._sound.add(step)
        return content

    def _read(
        self, step: int, target: Any, **options: Any
    ) -> tuple[Sequence[integrity.Finding], RestoredCheckpoint | None]:
        """Verify a step, unless it is known to be sound, and read it if there is a target."""
        path, verifies = folders.step_folder(self._directory, step), step not in self._sound
        content: RestoredCheckpoint | None = None
        if target is None:
            findings = integrity.verify_together(path) if verifies else ()
        else:
            from layerkit_runner.checkpointing import handlers

            findings, content = handlers.read_step(path, step, target, verifies=verifies, **options)
        for finding in findings:
            if not finding.is_damage and jax.process_index() == 0:
                self._report(
                    f"Ignoring {path / finding.file}, which is not part of the saved checkpoint."
                )
        for line in () if content is None else content.casts:
            self._report(f"The checkpoint {path}: {line}")
        return findings, content

    def wait_until_finished(self) -> None:
        """Block until the save in progress is committed; raise its errors once, as `save` does."""
        self._raise_nonfinite()
        if self._orbax is not None:
            try:
                # The time limit of Orbax covers only a part of a save.
                while self._orbax.is_saving_in_progress():
                    if self._is_overdue():
                        raise TimeoutError
                    time.sleep(_POLL_SECONDS)
                self._orbax.wait_until_finished()
            except STORAGE_ERRORS as error:
                raise self._discard_failed_save(error) from error
        step, self._step_in_progress = self._step_in_progress, None
        self._announce_commit(step)

    def _raise_nonfinite(self) -> None:
        """Raise the error of a state with NaN, on every process after the same step."""
        check, self._check = self._check, None
        if check is not None and check.nonfinite():
            gather_results(self.wait_until_finished)

    def _announce_commit(self, step: int | None) -> None:
        if step is not None and self._on_commit is not None and jax.process_index() == 0:
            self._on_commit(step)

    def _is_overdue(self) -> bool:
        return time.monotonic() >= self._deadline + _DEADLINE_GRACE_SECONDS

    def _discard_failed_save(self, error: Exception) -> SaveError | NonFiniteError:
        step, newest = self._last_saved, self.latest_step()
        # A new Orbax manager is needed, since this one would raise the same error in every call.
        self._orbax = self._step_in_progress = self._check = None
        self._last_saved = newest
        return save_error(
            error,
            step=-1 if step is None else step,
            directory=self._directory,
            newest=newest,
            timeout_secs=self._async_timeout_secs,
        )

    def close(self) -> None:
        """Wait for the save in progress and stop all threads of Orbax."""
        self.wait_until_finished()
        if self._orbax is not None:
            self._orbax.close()
            self._orbax = None

    def __enter__(self) -> CheckpointManager:
        """Return this manager."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close this manager."""
        self.close()

    def _write_evaluations(self) -> None:
        if self._evaluations:
            saved = {*folders.committed_steps(self._directory), self._last_saved}
            for step in self._evaluations.keys() - saved:
                del self._evaluations[step]
            if jax.process_index() == 0:
                write_evaluations(self._directory, self._evaluations)

    def _move_irregular(self, steps: Sequence[int]) -> None:
        """Move steps aside whose commit record Orbax, which reads it, would wait for."""
        for path in (folders.step_folder(self._directory, step) for step in steps):
            if (finding := integrity.irregular_commit_file(path)) is not None:
                aside = folders.move_aside(path).name
                self._report(f"CHECKPOINT DAMAGED: {path}\n  {finding}\n  Moved aside to {aside}.")

    def _report_missing(
        self, recorded: int | str | None, listed: Sequence[int], *, used_instead: int | None
    ) -> None:
        """Report that the newest step of the record is missing, as in a partial copy."""
        if used_instead is None or not isinstance(recorded, int) or recorded <= max(listed):
            return
        lost = integrity.lost_text(recorded, used_instead)
        path = folders.step_folder(self._directory, recorded)
        self._report(
            f"CHECKPOINT MISSING: {folders.record_file(self._directory)} records step {recorded},"
            f" but there is no {path}.\n{lost}"
        )

    def _move_damaged(
        self,
        listed: Sequence[int],
        damaged: Mapping[int, Sequence[integrity.Finding]],
        *,
        used_instead: int | None,
    ) -> None:
        """Report damaged steps; move them aside unless read-only or all steps are damaged."""
        for step, findings in damaged.items():
            path = folders.step_folder(self._directory, step)
            # A step may look damaged because the job that owns the folder deletes it meanwhile.
            if not folders.is_there(path) or (self._read_only and self.latest_step() != listed[-1]):
                continue
            message = integrity.damage_message(
                step, findings, directory=path, used_instead=used_instead
            )
            if not self._read_only and used_instead is not None:
                message += f"\n  It was moved aside to {folders.move_aside(path).name}."
            self._report(message)
