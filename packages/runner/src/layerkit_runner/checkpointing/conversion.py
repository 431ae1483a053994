"""Rewrites steps in the other format, and exports weights as safetensors.

A step is written as an unfinished save and renamed when it is complete and verified. This module
imports Orbax.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from etils import epath

from layerkit_runner.checkpointing import folders, handlers, integrity, stored_state
from layerkit_runner.checkpointing.policy import read_evaluations, write_evaluations
from layerkit_runner.checkpointing.stored_state import StateFormat
from layerkit_runner.files.atomic_write import atomic_write

_READ_BYTES = 2**30
_REPLACED_FILES = ("state/", f"{integrity.MANIFEST_FOLDER}/", folders.COMMIT_FILE)


def convert_step(
    source: epath.Path, destination: epath.Path, step: int, *, state_format: StateFormat
) -> epath.Path:
    """Write a step to another folder in another format of the state; return its folder.

    Input states, metadata and date stay the same. This machine's memory has to hold the state.

    Raises:
      FileExistsError: The destination has this step.
      DamagedCheckpointError: The step is damaged.
    """
    original = folders.step_folder(source, step)
    leaves = read_leaves(original)
    with _new_step_folder(destination, step) as partial:
        for name in integrity.file_sizes(original):
            if not name.startswith(_REPLACED_FILES):
                (partial / name).parent.mkdir(parents=True, exist_ok=True)
                (partial / name).write_bytes((original / name).read_bytes())
        about = {**folders.read_metadata(original), "state_format": state_format.value}
        folders.write_metadata(partial, about)
        (partial / "state").mkdir()
        with contextlib.closing(handlers.StateHandler()) as writer:
            writer.save(partial / "state", handlers.StateSave(leaves, state_format))
            writer.finalize(partial / "state")
        (partial / integrity.MANIFEST_FOLDER).mkdir()
        integrity.write(partial, manifest_directory=partial / integrity.MANIFEST_FOLDER)
    if (metrics := read_evaluations(source).get(step)) is not None:
        write_evaluations(destination, {**read_evaluations(destination), step: metrics})
    return folders.step_folder(destination, step)


def write_safetensors(
    source: epath.Path, path: epath.Path, step: int, *, part: str = "params"
) -> int:
    """Write a part of the state of a step as one safetensors file; return the number of arrays.

    Raises:
      FileExistsError: The file exists.
      DamagedCheckpointError: The step is damaged.
      KeyError: The state has no such part.
    """
    from safetensors.flax import save

    if path.exists():
        raise FileExistsError(f"{path} already exists; nothing was changed")
    leaves = read_leaves(folders.step_folder(source, step), part=part)
    content = save(
        {stored_state.join(name): leaf for name, leaf in leaves.items()},
        metadata={"step": str(step), "source": str(source)},
    )
    atomic_write(path, content)
    return len(leaves)


def read_leaves(
    step_directory: epath.Path, *, part: str | None = None
) -> dict[stored_state.LeafPath, jax.Array]:
    """Read the state of a step, or a part of it, onto one device of this machine."""
    findings = integrity.verify(step_directory)
    integrity.require_sound(step_directory, findings)
    stored = handlers.stored_leaves(step_directory / "state")
    chosen = {path: spec for path, spec in stored.items() if part is None or path[0] == part}
    if not chosen:
        raise KeyError(part)
    return _restore(step_directory, chosen)


def nonfinite_arrays(step_directory: epath.Path) -> list[stored_state.LeafPath]:
    """Return the paths of arrays of an intact step that are not finite."""
    group: dict[stored_state.LeafPath, stored_state.LeafSpec] = {}
    paths, size = [], 0
    for path, spec in handlers.stored_leaves(step_directory / "state").items():
        if group and size + spec.num_bytes > _READ_BYTES:
            paths += stored_state.FiniteCheck(_restore(step_directory, group)).nonfinite()
            group, size = {}, 0
        group[path] = spec
        size += spec.num_bytes
    return paths + stored_state.FiniteCheck(_restore(step_directory, group)).nonfinite()


@contextlib.contextmanager
def _new_step_folder(directory: epath.Path, step: int) -> Iterator[epath.Path]:
    """Yield a folder to fill; make it the step at the end, or delete it after an error."""
    final = folders.step_folder(directory, step)
    if step in folders.committed_steps(directory):
        raise FileExistsError(f"{final} already exists; nothing was changed")
    partial = folders.new_unfinished(directory, step)
    try:
        yield partial
        folders.commit(partial, final)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.rmtree()
        raise


def _restore(
    step_directory: epath.Path, specs: Mapping[stored_state.LeafPath, stored_state.LeafSpec]
) -> dict[stored_state.LeafPath, jax.Array]:
    device = jax.sharding.SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
    targets: dict[stored_state.LeafPath, Any] = {
        path: jax.ShapeDtypeStruct(spec.shape, np.dtype(spec.dtype), sharding=device)
        for path, spec in specs.items()
    }
    return handlers.read_state(step_directory / "state", targets)
