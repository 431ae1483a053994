"""Reads whole steps onto the CPU, to search them for NaN or to write them as safetensors.

This module imports Orbax.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from etils import epath

from layerkit_runner.checkpointing import folders, handlers, integrity, stored_state
from layerkit_runner.files.atomic_write import atomic_write

_READ_BYTES = 2**30


def write_safetensors(source: epath.Path, path: epath.Path, step: int, *, part: str) -> int:
    """Write a part of the state of a step as one safetensors file; return the number of arrays.

    Raises:
      FileExistsError: The file exists.
      DamagedCheckpointError: The step is damaged.
      KeyError: The state has no such part.
    """
    from safetensors.flax import save

    if path.exists():
        raise FileExistsError(f"{path} already exists; nothing was changed")
    step_directory = folders.step_folder(source, step)
    integrity.require_sound(step_directory, integrity.verify(step_directory))
    stored = handlers.stored_leaves(step_directory / "state")
    chosen = {name: spec for name, spec in stored.items() if name[0] == part}
    if not chosen:
        raise KeyError(part)
    leaves = _restore(step_directory, chosen)
    content = save(
        {stored_state.join(name): leaf for name, leaf in leaves.items()},
        metadata={"step": str(step), "source": str(source)},
    )
    atomic_write(path, content)
    return len(leaves)


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


def _restore(
    step_directory: epath.Path, specs: Mapping[stored_state.LeafPath, stored_state.LeafSpec]
) -> dict[stored_state.LeafPath, jax.Array]:
    """Read arrays of a step onto one device of this machine."""
    device = jax.sharding.SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
    targets: dict[stored_state.LeafPath, Any] = {
        path: jax.ShapeDtypeStruct(spec.shape, np.dtype(spec.dtype), sharding=device)
        for path, spec in specs.items()
    }
    return handlers.read_state(step_directory / "state", targets)
