"""Arrays that Paxml saved in Flax's format: one msgpack file, as under pmap.

The file holds the leaves of the train state as a list, and a text that describes their tree.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping

import numpy as np
from etils import epath

from layerkit_runner.checkpointing.errors import DamagedCheckpointError
from layerkit_runner.checkpointing.structure import LeafSpec
from layerkit_runner.files.atomic_write import is_remote
from layerkit_runner.init_from.pax import msgpack_file, tree_text


class MsgpackArrays:
    """Arrays in a msgpack file; see `arrays.PaxArrays`.

    Attributes:
      specs: Stored shape and dtype of each array, by name.
    """

    def __init__(self, path: epath.Path) -> None:
        """Find the arrays and their names.

        Raises:
          DamagedCheckpointError: The file is malformed.
        """
        self._path = path
        try:
            with path.open("rb") as file:
                content = msgpack_file.scan(file, path.stat().length)
            self._arrays = _named(content)
        except (ValueError, UnicodeDecodeError) as error:
            raise DamagedCheckpointError(
                f"cannot be read: {error}",
                field="file",
                value=str(path),
                expected="a msgpack file of Flax with flattened_state and str_pytree_state",
                hint="Copy the checkpoint again.",
            ) from error
        self.specs: Mapping[str, LeafSpec] = {
            name: found.spec for name, found in self._arrays.items()
        }

    def check(self, names: Collection[str]) -> None:
        """Do nothing: sizes were compared with the file when it was opened."""

    def read(self, name: str, ranges: tuple[slice, ...]) -> np.ndarray:
        """Read a block of an array. A local file is mapped; of another, the array is read whole."""
        found = self._arrays[name]
        shape, dtype = found.spec.shape, found.spec.dtype
        if len(found.spans) == 1 and not is_remote(self._path) and found.spec.num_bytes:
            start = found.spans[0].start
            path = os.fspath(self._path)
            bytes_of = np.memmap(path, np.uint8, "r", start, (found.spec.num_bytes,))
            return np.array(bytes_of.view(dtype).reshape(shape)[ranges])
        with self._path.open("rb") as file:
            parts = []
            for span in found.spans:
                file.seek(span.start)
                parts.append(file.read(span.size))
        return np.frombuffer(b"".join(parts), dtype).reshape(shape)[ranges].copy()


def _named(content: object) -> dict[str, msgpack_file.ArrayInFile]:
    """Return the arrays by name; leaves that are no arrays are left out."""
    if not isinstance(content, dict):
        raise ValueError("expected a map")
    text, state = content.get("str_pytree_state"), content.get("flattened_state")
    if isinstance(state, dict):  # Flax wrote lists as maps from "0", "1", …
        state = [state.get(str(number)) for number in range(len(state))]
    if not isinstance(text, str) or not isinstance(state, list):
        raise ValueError("flattened_state or str_pytree_state is missing")
    paths = tree_text.leaf_paths(text)
    if len(paths) != len(state):
        raise ValueError(f"{len(state)} arrays, and names of {len(paths)}")
    return {
        "/".join(path): leaf
        for path, leaf in zip(paths, state, strict=True)
        if isinstance(leaf, msgpack_file.ArrayInFile)
    }
