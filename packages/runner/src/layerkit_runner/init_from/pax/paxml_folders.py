"""Finds the steps that Paxml wrote into a folder, and opens their arrays by name.

Paxml writes `checkpoints/checkpoint_<step>/state` in the folder of a job, beside
`metadata/metadata`. Versions before 1.0 wrote the files of `state` into the step folder itself.
Arrays are in Zarr folders, in an OCDBT database, or in one msgpack file of Flax.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import urllib.parse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from etils import epath
from flax import serialization

from layerkit_runner.checkpointing import folders as own_folders
from layerkit_runner.checkpointing.errors import DamagedCheckpointError
from layerkit_runner.checkpointing.stored_state import LeafSpec
from layerkit_runner.errors import UsageError
from layerkit_runner.files.atomic_write import is_remote
from layerkit_runner.init_from.pax import tree_text

if TYPE_CHECKING:
    import tensorstore as ts

# Flax's format has no leading zeros, and Paxml can leave out the prefix.
_STEP_NAME = re.compile(r"(?:checkpoint_)?(\d{1,18})")
_MSGPACK_FILE = "checkpoint"
_OCDBT_FILE = "manifest.ocdbt"
_ZARR_PREFIX = "mdl_vars."
_END = "/.zarray"
# Details that TensorStore appends to a message.
_DETAILS = re.compile(r" \[(?:source locations|tensorstore_spec)=")


@dataclasses.dataclass(frozen=True)
class PaxFolder:
    """The steps that Paxml wrote into a folder of checkpoints, in ascending order."""

    directory: epath.Path
    steps: dict[int, epath.Path]

    def choose(self, step: int | None) -> tuple[int, epath.Path]:
        """Return (step, its folder); the newest for None."""
        chosen = max(self.steps) if step is None else step
        if chosen not in self.steps:
            owner, steps = str(self.directory), list(self.steps)
            raise UsageError(
                "no such checkpoint", owner=owner, field="step", value=step, choices=steps
            )
        return chosen, self.steps[chosen]


def find(directory: epath.Path) -> PaxFolder | None:
    """Return the checkpoints of Paxml in a folder of a job, or of one step; None if it has none."""
    named = _STEP_NAME.fullmatch(directory.name)
    if named and _is_pax(directory):
        return PaxFolder(directory.parent, {int(named[1]): directory})
    for place in (directory, directory / own_folders.JOB_SUBFOLDER):
        steps = {
            int(match[1]): path
            for path in (place.iterdir() if place.is_dir() else ())
            if (match := _STEP_NAME.fullmatch(path.name)) and _is_pax(path)
        }
        if steps:
            return PaxFolder(place, dict(sorted(steps.items())))
    return None


def _state_folder(step_folder: epath.Path) -> epath.Path:
    """Return the folder of the arrays of a step."""
    inner = step_folder / "state"
    return inner if inner.is_dir() else step_folder


def _is_pax(step_folder: epath.Path) -> bool:
    """Return whether Paxml wrote and committed a step."""
    if not step_folder.is_dir():
        return False
    if is_remote(step_folder) and not (step_folder / own_folders.COMMIT_FILE).exists():
        return False
    state = _state_folder(step_folder)
    if (state / _MSGPACK_FILE).is_file():
        return True
    if (state / _OCDBT_FILE).is_file():
        return (step_folder / "metadata" / "metadata").is_file()
    return any(path.name.startswith(_ZARR_PREFIX) for path in state.iterdir())


@dataclasses.dataclass(frozen=True)
class StoredArrays:
    """The arrays of a step by name, such as `mdl_vars/params/lm/final_ln/scale`."""

    folder: epath.Path
    by_name: Mapping[str, ts.TensorStore]

    @functools.cached_property
    def specs(self) -> dict[str, LeafSpec]:
        """Shapes and dtypes by name."""
        return {
            name: LeafSpec(tuple(array.shape), array.dtype.numpy_dtype)
            for name, array in self.by_name.items()
        }

    def read(self, name: str, view: ts.TensorStore) -> np.ndarray:
        """Read the chunks of a view, such as a block, of arrays of which the first is `name`."""
        try:
            return np.asarray(view.read().result())
        except ValueError as error:
            raise _damaged(self.folder, name, error) from error


def open_arrays(step_folder: epath.Path) -> StoredArrays:
    """Open the arrays of a step; only names, shapes and dtypes are read."""
    state = _state_folder(step_folder)
    is_ocdbt = (state / _OCDBT_FILE).is_file()
    if not is_ocdbt and (state / _MSGPACK_FILE).is_file():
        return read_msgpack(state / _MSGPACK_FILE)
    return _open_tensorstore(state, is_ocdbt=is_ocdbt)


def read_msgpack(path: epath.Path) -> StoredArrays:
    """Read the arrays that Paxml saved in Flax's format, as under pmap.

    The file holds the leaves of the train state as a list, and a text that describes their tree. It
    is read whole, which takes no more memory than it has bytes.
    """
    import tensorstore as ts

    try:
        arrays = _named(serialization.msgpack_restore(path.read_bytes()))
        return StoredArrays(path.parent, {name: ts.array(x) for name, x in arrays.items()})
    except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        raise DamagedCheckpointError(
            f"cannot be read: {error}",
            field="file",
            value=str(path),
            expected="a msgpack file of Flax with flattened_state and str_pytree_state",
        ) from error


def _named(content: Any) -> dict[str, np.ndarray]:
    """Return the arrays by name; leaves that are not arrays are left out."""
    state = content["flattened_state"]
    if isinstance(state, dict):  # Flax wrote lists as maps from "0", "1", …
        state = [state[str(number)] for number in range(len(state))]
    paths = tree_text.leaf_paths(content["str_pytree_state"])
    return {
        "/".join(path): np.asarray(leaf)
        for path, leaf in zip(paths, state, strict=True)
        if isinstance(leaf, (np.ndarray, np.generic))
    }


def _open_tensorstore(state: epath.Path, *, is_ocdbt: bool) -> StoredArrays:
    """Open arrays that Paxml saved by TensorStore: a Zarr folder for each, or an OCDBT database.

    The name of `mdl_vars.params.lm.final_ln.scale` becomes `mdl_vars/params/lm/final_ln/scale`.
    """
    import tensorstore as ts

    try:
        store = _open_store(state, is_ocdbt=is_ocdbt)
        keys = [key.decode(errors="replace") for key in store.list().result()]
    except ValueError as error:
        raise _damaged(state, None, error) from error
    stored = sorted(key.removesuffix(_END) for key in keys if key.endswith(_END))
    opening = {
        key: ts.open(
            {
                "driver": "zarr",
                "kvstore": (store / f"{key}/").spec().to_json(),
                "fill_missing_data_reads": False,
            },
            open=True,
            read=True,
        )
        for key in stored
        if "/" not in key
    }
    arrays: dict[str, ts.TensorStore] = {}
    for key, array in opening.items():
        name = key.replace(".", "/")
        try:
            arrays[name] = array.result()
        except ValueError as error:
            raise _damaged(state, name, error) from error
    return StoredArrays(state, arrays)


def _open_store(state_directory: epath.Path, *, is_ocdbt: bool) -> ts.KvStore:
    """Open a folder of arrays: an OCDBT database, or else one folder for each array."""
    import tensorstore as ts

    text = os.fspath(state_directory)
    base = f"{text if is_remote(text) else f'file://{urllib.parse.quote(text)}'}".rstrip("/") + "/"
    return ts.KvStore.open({"driver": "ocdbt", "base": base} if is_ocdbt else base).result()


def _damaged(state: epath.Path, name: str | None, error: Exception) -> DamagedCheckpointError:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    return DamagedCheckpointError(
        f"cannot be read: {_DETAILS.split(reason)[0]}",
        owner=str(state),
        field="database" if name is None else "array",
        value=state.name if name is None else name,
        expected="files that Paxml wrote",
        hint="Copy the checkpoint again.",
    )
