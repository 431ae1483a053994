"""The Orbax handler that saves steps, and the functions that read them.

Importing this file imports Orbax (most of a second), so callers do it late.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from typing import Any, NoReturn

import jax
import orbax.checkpoint as ocp
from etils import epath
from flax.traverse_util import unflatten_dict

from layerkit_runner.checkpointing import folders, integrity, replicas, stored_state
from layerkit_runner.checkpointing.errors import naming_damage
from layerkit_runner.checkpointing.policy import CheckpointPolicy, Evaluations, SavedStep
from layerkit_runner.distributed.cluster import gather_results
from layerkit_runner.errors import NonFiniteError
from layerkit_runner.files.atomic_write import read_regular

_STATE = "state"
# Several files are hashed side by side. Orbax's default of 2 GiB would leave most cores idle.
_DATA_FILE_BYTES = 256 * 2**20


@dataclasses.dataclass
class StepSave(ocp.args.CheckpointArgs):
    """The content of a step to save.

    Attributes:
      leaves: Leaves of the state by path.
      state_format: Format of the state.
      metadata: JSON text of the step's metadata.
      input_states: JSON text of the input states of this process.
      check: Search for NaN and infinities, which starts after the copy of the state.
    """

    leaves: Mapping[stored_state.LeafPath, jax.Array]
    state_format: stored_state.StateFormat
    metadata: str
    input_states: str
    check: futures.Future[stored_state.FiniteCheck]


class StepHandler(ocp.handlers.AsyncCheckpointHandler):
    """Handler of a step: the state in either format, and the documents beside it.

    Only the state is an item of Orbax: training waits until the folder of each item exists and its
    threads have started.
    """

    def __init__(self) -> None:
        """Make the storage of arrays."""
        self._arrays = _array_storage()
        self._step_directory = epath.Path()

    async def async_save(self, directory: epath.Path, args: StepSave) -> list[ocp.future.Future]:
        """Copy the state to the host; return a future of its check, all files and digests."""
        self._step_directory = directory.parent
        process = jax.process_index()
        writes: list[ocp.future.Future] = []
        write: Callable[[], Mapping[str, integrity.Entry]] = dict
        if args.state_format is stored_state.StateFormat.TENSORSTORE:
            save = ocp.args.PyTreeSave(
                unflatten_dict(args.leaves), ocdbt_target_data_file_size=_DATA_FILE_BYTES
            )
            writes = await self._arrays.async_save(directory, args=save) or []
            # Orbax merges the indices of the processes afterwards, and leaves the files of this
            # process's arrays as they are.
            own = f"ocdbt.process_{process}"
            write = functools.partial(
                integrity.hash_folder, directory / own, name=f"{_STATE}/{own}"
            )
        elif process == 0:
            leaves = stored_state.host_copy(args.leaves)
            write = functools.partial(stored_state.write_msgpack, directory, leaves)

        def finish() -> None:
            # The error, the same on every process, keeps Orbax from committing the step.
            if paths := args.check.result().nonfinite():
                problem = stored_state.describe(paths)
                raise NonFiniteError(f"{problem}. Expected finite values.")
            folders.write_documents(directory.parent, args.metadata, args.input_states)
            integrity.write_share(directory.parent, write(), process=process)

        # Orbax's thread of the save calls `finish`. Training would wait for the start of another.
        return [ocp.future.ChainedFuture(writes, finish)]

    def save(self, directory: epath.Path, args: StepSave) -> None:
        """Save and wait; Orbax's manager does not call it."""
        for commit in asyncio.run(self.async_save(directory, args)):
            commit.result()

    def restore(self, directory: epath.Path, args: Any = None) -> NoReturn:
        """Raise an error: `CheckpointManager` reads the steps itself.

        Orbax ends a restore at a barrier. A process that meets a damaged file would raise an error,
        and the others would wait for it.
        """
        raise NotImplementedError

    def finalize(self, directory: epath.Path) -> None:
        """Merge the indices that the processes wrote."""
        if stored_state.format_of(directory) is stored_state.StateFormat.TENSORSTORE:
            self._arrays.finalize(directory)

    def write_manifest(self) -> None:
        """Write the manifest on process 0, after all files have their names, before the commit."""
        integrity.write(self._step_directory, num_shares=jax.process_count())

    def close(self) -> None:
        """Release Orbax's threads."""
        self._arrays.close()


def read_step(
    path: epath.Path, step: int, target: Any, *, verifies: bool = True, **options: Any
) -> tuple[tuple[integrity.Finding, ...], stored_state.RestoredCheckpoint | None]:
    """Return (findings of all processes, content of the step; None if it is damaged).

    A thread verifies the step meanwhile, unless `verifies` is False. All processes have to call it,
    with the options of `CheckpointManager.restore`.
    """
    content: stored_state.RestoredCheckpoint | None = None
    problem: Exception | None = None
    readings: dict[stored_state.LeafPath, replicas.Reading] = {}
    # Before any file is opened, since opening a pipe would wait for ever.
    findings = integrity.merge(lambda: integrity.find_irregular(path))
    if findings:
        return findings, None
    with futures.ThreadPoolExecutor(1) as verifiers:
        verifying = verifiers.submit(integrity.verify_own, path) if verifies else None
        try:
            in_turns = stored_state.format_of(path / _STATE) is stored_state.StateFormat.TENSORSTORE
            readings = replicas.assign(stored_state.named_leaves(target), in_turns=in_turns)
            content = _read_unverified(path, step, target, readings, **options)
        except Exception as error:  # which damage may have caused
            problem = error
    # Processes agree on the damage before any of them raises another error.
    findings = () if verifying is None else integrity.merge(verifying.result)
    if any(finding.is_damage for finding in findings):
        return findings, None

    def raise_problem() -> None:
        if problem is not None:
            raise problem

    gather_results(raise_problem)
    assert content is not None
    leaves = []
    for name in stored_state.named_leaves(target):
        leaf = content.state.pop(name, None)  # Devices have no room for two states.
        leaves.append(readings[name].broadcast(leaf) if name in readings else leaf)
    state = jax.tree.unflatten(jax.tree.structure(target), leaves)
    return findings, dataclasses.replace(content, state=state)


def _read_unverified(
    path: epath.Path,
    step: int,
    target: Any,
    readings: Mapping[stored_state.LeafPath, replicas.Reading],
    *,
    leave_out: Sequence[str] = (),
    cast_dtypes: bool = False,
    with_input_states: bool = True,
) -> stored_state.RestoredCheckpoint:
    about = folders.read_metadata(path)
    targets = stored_state.named_leaves(target)
    stored = stored_leaves(path / _STATE)
    stored = {name: spec for name, spec in stored.items() if name[0] not in leave_out}
    where = f"The checkpoint {path}"
    stored, empty = stored_state.start_empty(stored, targets)
    stored_targets = {name: spec for name, spec in targets.items() if name not in empty}
    stored_state.check_match(stored, stored_targets, where=where, cast_dtypes=cast_dtypes)
    own = {
        name: readings[name].local if name in readings else spec
        for name, spec in stored_targets.items()
    }
    own = {name: spec for name, spec in own.items() if spec is not None}
    return stored_state.RestoredCheckpoint(
        step=step,
        state=read_state(path / _STATE, own) | empty,
        input_states=folders.read_input_states(path) if with_input_states else {},
        metadata=about["user"],
        casts=stored_state.cast_lines(stored, stored_targets),
    )


def read_state(
    state_directory: epath.Path, targets: Mapping[stored_state.LeafPath, Any]
) -> dict[stored_state.LeafPath, jax.Array]:
    """Read the leaves of a stored state, in either format."""
    if not targets:
        return {}
    if stored_state.format_of(state_directory) is stored_state.StateFormat.MSGPACK:
        with naming_damage(state_directory / stored_state.STATE_FILE):
            return stored_state.read_msgpack(state_directory, targets)
    nested = unflatten_dict(targets)
    restore_args = ocp.checkpoint_utils.construct_restore_args(nested)
    args = ocp.args.PyTreeRestore(item=nested, restore_args=restore_args, partial_restore=True)
    with naming_damage(state_directory), contextlib.closing(_array_storage()) as reader:
        return stored_state.named_leaves(reader.restore(state_directory, args=args))


def stored_leaves(
    state_directory: epath.Path,
) -> dict[stored_state.LeafPath, stored_state.LeafSpec]:
    """Return shapes and dtypes of the stored leaves, in either format; read no array."""
    if stored_state.format_of(state_directory) is stored_state.StateFormat.MSGPACK:
        with naming_damage(state_directory / stored_state.STATE_FILE):
            return stored_state.msgpack_leaves(state_directory)
    about = state_directory / "_METADATA"  # Orbax's description of the arrays
    with naming_damage(about):
        json.loads(read_regular(about))
    with naming_damage(state_directory), contextlib.closing(_array_storage()) as reader:
        stored = stored_state.named_leaves(reader.metadata(state_directory).tree)
        return {path: stored_state.spec_of(leaf) for path, leaf in stored.items()}


@dataclasses.dataclass(frozen=True)
class _Preservation:
    policy: CheckpointPolicy
    evaluated: Evaluations

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        del context
        saved = [
            SavedStep(checkpoint.step, checkpoint.time, self.evaluated.get(checkpoint.step, {}))
            for checkpoint in checkpoints
        ]
        keep = self.policy.steps_to_keep(saved)
        return [checkpoint.step in keep for checkpoint in checkpoints]


def orbax_manager(
    directory: epath.Path,
    policy: CheckpointPolicy,
    evaluated: Evaluations,
    *,
    timeout_secs: int,
    todelete_subdir: str | None,
) -> ocp.CheckpointManager:
    """Return Orbax's manager of a folder; see `CheckpointManager`."""
    handler = StepHandler()
    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    registry.add(_STATE, StepSave, handler)
    options = ocp.CheckpointManagerOptions(
        step_name_format=ocp.path.step.standard_name_format(
            step_prefix=folders.STEP_PREFIX, step_format_fixed_length=folders.STEP_DIGITS
        ),
        preservation_policy=_Preservation(policy, evaluated),
        todelete_subdir=todelete_subdir,
        # Folders are created synchronously, so that an error is raised at once. With folders
        # created in the background, all other work would wait for them for minutes.
        async_options=ocp.AsyncOptions(
            timeout_secs=timeout_secs,
            create_directories_asynchronously=False,
            post_finalization_callback=handler.write_manifest,
        ),
    )
    return ocp.CheckpointManager(directory, options=options, handler_registry=registry)


def _array_storage() -> ocp.handlers.PyTreeCheckpointHandler:
    # If every replica writes its share, Orbax slices arrays on the devices, which compiles a
    # program per shape and delays the first save by seconds. One process gains nothing from it.
    arrays = ocp.type_handlers.ArrayHandler(use_replica_parallel=jax.process_count() > 1)
    return ocp.handlers.PyTreeCheckpointHandler(
        use_ocdbt=True,
        type_handler_registry=ocp.type_handlers.create_type_handler_registry((jax.Array, arrays)),
    )
