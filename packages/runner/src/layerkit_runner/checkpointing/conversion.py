"""Rewrites a step in the other format, or its weights as one safetensors file.

What is rewritten is the state alone: where the inputs stood, the metadata and the date are taken
over. The whole state passes through this machine's memory. Imports Orbax.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from etils import epath

from layerkit_runner.checkpointing import (
    copying,
    finite,
    folders,
    handlers,
    integrity,
    step_metadata,
    structure,
)
from layerkit_runner.checkpointing.formats import StateFormat, format_of
from layerkit_runner.files.atomic_write import atomic_write

_READ_BYTES = 2**30
_WRITTEN_ANEW = ("state/", f"{integrity.MANIFEST_FOLDER}/", folders.COMMIT_FILE)


def convert_step(
    source: epath.Path, destination: epath.Path, step: int, *, state_format: StateFormat
) -> epath.Path:
    """Writes a step once more, its state in this format.

    Args:
      source: the folder of the checkpoints to read.
      destination: the folder of checkpoints to write to; made if need be.
      step: a committed step.
      state_format: of the new one.

    Returns:
      The folder of the new step.

    Raises:
      FileExistsError: the destination has this step.
      DamagedCheckpointError: the step is damaged.
      ValueError: its state is in this format already.
      OSError: storage refused.
    """
    original = folders.step_folder(source, step)
    if format_of(original / "state") is state_format:
        raise ValueError(f"{original} is {state_format.value} already; use copy")
    leaves = read_leaves(original)
    with copying.new_step_folder(destination, step) as partial:
        for name in integrity.file_sizes(original):
            if not name.startswith(_WRITTEN_ANEW):
                (partial / name).parent.mkdir(parents=True, exist_ok=True)
                (partial / name).write_bytes((original / name).read_bytes())
        about = {**step_metadata.read(original), "state_format": state_format.value}
        step_metadata.write(partial, about)
        (partial / "state").mkdir()
        with contextlib.closing(handlers.StateHandler()) as writer:
            writer.save(partial / "state", handlers.StateSave(leaves, state_format))
            writer.finalize(partial / "state")
        (partial / integrity.MANIFEST_FOLDER).mkdir()
        integrity.write(partial, manifest_directory=partial / integrity.MANIFEST_FOLDER)
    copying.copy_evaluations(source, destination, step)
    return folders.step_folder(destination, step)


def write_safetensors(
    source: epath.Path, path: epath.Path, step: int, *, part: str = "params"
) -> int:
    """Writes arrays of a step as one safetensors file, by the names of their paths.

    Args:
      source: the folder of the checkpoints to read.
      path: the file to write.
      step: a committed step.
      part: which part of the state, the first name of the paths.

    Returns:
      How many arrays were written.

    Raises:
      FileExistsError: the file is there.
      DamagedCheckpointError: the step is damaged.
      ImportError: safetensors is not installed.
      KeyError: the state has no such part.
      OSError: storage refused.
    """
    from safetensors.flax import save

    if path.exists():
        raise FileExistsError(f"{path} is there already; nothing was changed")
    leaves = read_leaves(folders.step_folder(source, step), part=part)
    content = save(
        {structure.join(name): leaf for name, leaf in leaves.items()},
        metadata={"step": str(step), "source": str(source)},
    )
    atomic_write(path, content)
    return len(leaves)


def parts_of(source: epath.Path, step: int) -> list[str]:
    """Returns the first names of the paths in the state of a step."""
    stored = handlers.stored_leaves(folders.step_folder(source, step) / "state")
    return sorted({path[0] for path in stored})


def read_leaves(
    step_directory: epath.Path, *, part: str | None = None
) -> dict[structure.LeafPath, jax.Array]:
    """Reads the state of a step, or a part of it, onto one device of this machine.

    Raises:
      DamagedCheckpointError: the step is damaged.
      KeyError: the state has no such part.
    """
    findings = integrity.verify(step_directory)
    integrity.require_sound(f"The checkpoint {step_directory} is damaged", findings)
    stored = handlers.stored_leaves(step_directory / "state")
    chosen = {path: spec for path, spec in stored.items() if part is None or path[0] == part}
    if not chosen:
        raise KeyError(part)
    with contextlib.closing(handlers.StateHandler()) as reader:
        wanted = handlers.StateRestore(_on_one_device(chosen))
        return reader.restore(step_directory / "state", wanted)


def nonfinite_arrays(step_directory: epath.Path) -> list[structure.LeafPath]:
    """Return the paths of stored arrays that are not finite; see `finite.nonfinite_leaves`.

    Reads about a GiB at a time.

    Args:
      step_directory: The folder of a step whose files are as they were written.
    """
    stored = handlers.stored_leaves(step_directory / "state")
    found: list[structure.LeafPath] = []
    with contextlib.closing(handlers.StateHandler()) as reader:
        for part in _in_parts(stored):
            wanted = handlers.StateRestore(_on_one_device(part))
            found += finite.nonfinite_leaves(reader.restore(step_directory / "state", wanted))
    return found


def _in_parts(
    stored: Mapping[structure.LeafPath, structure.LeafSpec],
) -> Iterator[dict[structure.LeafPath, structure.LeafSpec]]:
    """Yield the leaves in groups of at most `_READ_BYTES`, or of one leaf that is larger."""
    part: dict[structure.LeafPath, structure.LeafSpec] = {}
    for path, spec in stored.items():
        if part and sum(each.num_bytes for each in part.values()) + spec.num_bytes > _READ_BYTES:
            yield part
            part = {}
        part[path] = spec
    if part:
        yield part


def _on_one_device(specs: Mapping[structure.LeafPath, structure.LeafSpec]) -> dict[Any, Any]:
    device = jax.sharding.SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
    return {
        path: jax.ShapeDtypeStruct(spec.shape, np.dtype(spec.dtype), sharding=device)
        for path, spec in specs.items()
    }
