"""Copies steps, rewrites them in the other format, and exports weights as safetensors.

A step is written under the name of an unfinished save and renamed when it is complete and verified.
The next training job in that folder deletes the files of a killed copy, as those of a killed save.
This module imports Orbax.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Mapping
from concurrent import futures
from typing import Any

import jax
import numpy as np
from etils import epath
from tqdm import tqdm

from layerkit.errors import ConfigError
from layerkit_runner.checkpointing import documents, folders, handlers, integrity, structure
from layerkit_runner.checkpointing.formats import StateFormat, format_of
from layerkit_runner.files.atomic_write import atomic_write

_READ_BYTES = 2**30
_BLOCK_BYTES = 8 * 2**20
_COPIERS = 8
_REPLACED_FILES = ("state/", f"{integrity.MANIFEST_FOLDER}/", folders.COMMIT_FILE)


def copy_step(source: epath.Path, destination: epath.Path, step: int) -> epath.Path:
    """Copy a step and its recorded evaluation to another folder of checkpoints; return its folder.

    Raises:
      FileExistsError: The destination has this step.
      DamagedCheckpointError: The step is damaged; nothing is left of the copy.
      OSError: Storage failed; nothing is left of the copy.
    """
    original = folders.step_folder(source, step)
    with _new_step_folder(destination, step) as partial:
        sizes = integrity.file_sizes(original)
        sizes.pop(folders.COMMIT_FILE, None)  # written at the commit of the copy
        for folder in sorted({(partial / name).parent for name in sizes}):
            folder.mkdir(parents=True, exist_ok=True)

        def copy(name: str) -> int:
            with (original / name).open("rb") as reader, (partial / name).open("wb") as writer:
                shutil.copyfileobj(reader, writer, _BLOCK_BYTES)
            return sizes[name]

        total = sum(sizes.values())
        bar = tqdm(desc=f"step {step}", total=total, unit="B", unit_scale=True, disable=None)
        with bar, futures.ThreadPoolExecutor(_COPIERS) as copiers:
            for size in copiers.map(copy, sizes):
                bar.update(size)
        integrity.require_sound(
            f"The copy of {original} differs from the saved step and was deleted",
            integrity.verify(partial),
            hint="Check the original with: verify.",
        )
    copy_evaluations(source, destination, step)
    return folders.step_folder(destination, step)


def copy_evaluations(source: epath.Path, destination: epath.Path, step: int) -> None:
    """Copy the recorded evaluation of a step."""
    found = documents.read_evaluations(source).get(step)
    if found is not None:
        known = documents.read_evaluations(destination)
        documents.write_evaluations(destination, {**known, step: found})


def convert_step(
    source: epath.Path, destination: epath.Path, step: int, *, state_format: StateFormat
) -> epath.Path:
    """Write a step to another folder in another format of the state; return its folder.

    Input states, metadata and date stay the same. This machine's memory has to hold the state.

    Raises:
      FileExistsError: The destination has this step.
      DamagedCheckpointError: The step is damaged.
      ConfigError: The state already has this format.
      OSError: Storage failed.
    """
    original = folders.step_folder(source, step)
    if format_of(original / "state") is state_format:
        raise ConfigError(
            "already has this format",
            owner=str(original),
            field="--to",
            value=state_format.value,
            hint="Use copy instead.",
        )
    leaves = read_leaves(original)
    with _new_step_folder(destination, step) as partial:
        for name in integrity.file_sizes(original):
            if not name.startswith(_REPLACED_FILES):
                (partial / name).parent.mkdir(parents=True, exist_ok=True)
                (partial / name).write_bytes((original / name).read_bytes())
        about = {**documents.read(original), "state_format": state_format.value}
        documents.write(partial, about)
        (partial / "state").mkdir()
        with contextlib.closing(handlers.StateHandler()) as writer:
            writer.save(partial / "state", handlers.StateSave(leaves, state_format))
            writer.finalize(partial / "state")
        (partial / integrity.MANIFEST_FOLDER).mkdir()
        integrity.write(partial, manifest_directory=partial / integrity.MANIFEST_FOLDER)
    copy_evaluations(source, destination, step)
    return folders.step_folder(destination, step)


def write_safetensors(
    source: epath.Path, path: epath.Path, step: int, *, part: str = "params"
) -> int:
    """Write a part of the state of a step as one safetensors file; return the number of arrays.

    Raises:
      FileExistsError: The file exists.
      DamagedCheckpointError: The step is damaged.
      ImportError: safetensors is not installed.
      KeyError: The state has no such part.
      OSError: Storage failed.
    """
    from safetensors.flax import save

    if path.exists():
        raise FileExistsError(f"{path} already exists; nothing was changed")
    leaves = read_leaves(folders.step_folder(source, step), part=part)
    content = save(
        {structure.join(name): leaf for name, leaf in leaves.items()},
        metadata={"step": str(step), "source": str(source)},
    )
    atomic_write(path, content)
    return len(leaves)


def read_leaves(
    step_directory: epath.Path, *, part: str | None = None
) -> dict[structure.LeafPath, jax.Array]:
    """Read the state of a step, or a part of it, onto one device of this machine."""
    findings = integrity.verify(step_directory)
    integrity.require_sound(f"The checkpoint {step_directory} is damaged", findings)
    stored = handlers.stored_leaves(step_directory / "state")
    chosen = {path: spec for path, spec in stored.items() if part is None or path[0] == part}
    if not chosen:
        raise KeyError(part)
    return _restore(step_directory, chosen)


def nonfinite_arrays(step_directory: epath.Path) -> list[structure.LeafPath]:
    """Return the paths of arrays of an intact step that are not finite."""
    group: dict[structure.LeafPath, structure.LeafSpec] = {}
    found, size = [], 0
    for path, spec in handlers.stored_leaves(step_directory / "state").items():
        if group and size + spec.num_bytes > _READ_BYTES:
            found += structure.FiniteCheck(_restore(step_directory, group)).nonfinite()
            group, size = {}, 0
        group[path] = spec
        size += spec.num_bytes
    return found + structure.FiniteCheck(_restore(step_directory, group)).nonfinite()


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
    step_directory: epath.Path, specs: Mapping[structure.LeafPath, structure.LeafSpec]
) -> dict[structure.LeafPath, jax.Array]:
    device = jax.sharding.SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
    targets: dict[structure.LeafPath, Any] = {
        path: jax.ShapeDtypeStruct(spec.shape, np.dtype(spec.dtype), sharding=device)
        for path, spec in specs.items()
    }
    return handlers.read_state(step_directory / "state", targets)
