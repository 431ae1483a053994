"""Writing of tensors into safetensors files of limited size, with their index."""

from __future__ import annotations

import secrets
import stat
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from layerkit.interop.hugging_face.folder import INDEX, WEIGHTS, import_safetensors, write_json


class ShardWriter:
    """A writer of tensors, one after the other, into files of limited size.

    Args:
      folder: Existing folder.
      sizes: Bytes of each tensor, in the order of `add`.
      max_shard_bytes: Largest size of a file; a larger tensor has a separate file.
    """

    def __init__(self, folder: Path, sizes: Mapping[str, int], *, max_shard_bytes: int):
        """Distribute the tensors over files."""
        self._folder, self._sizes = folder, dict(sizes)
        shards = _split(sizes, max_shard_bytes)
        self._file_of = {
            name: _shard_name(number, len(shards))
            for number, names in enumerate(shards, start=1)
            for name in names
        }
        self._left = {_shard_name(n, len(shards)): len(s) for n, s in enumerate(shards, start=1)}
        self._held: dict[str, np.ndarray] = {}

    def add(self, name: str, tensor: np.ndarray) -> None:
        """Add the next tensor, and write a file if it is complete."""
        self._held[name] = np.ascontiguousarray(tensor)
        file = self._file_of[name]
        self._left[file] -= 1
        if self._left[file] == 0:
            _write_tensors(self._folder / file, self._held)
            self._held = {}

    def finish(self) -> None:
        """Remove older tensors from the folder, and write the index if there are several files.

        A single file next to an older index would be two models, of which readers load one.
        """
        for stale in (
            *self._folder.glob("model-?????-of-?????.safetensors"),
            self._folder / WEIGHTS,
        ):
            if stale.name not in self._left:
                stale.unlink(missing_ok=True)
        (self._folder / INDEX).unlink(missing_ok=True)
        if len(self._left) > 1:
            index = {
                "metadata": {"total_size": sum(self._sizes.values())},
                "weight_map": self._file_of,
            }
            write_json(self._folder, INDEX, index)


def _write_tensors(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Replace a safetensors file by an atomic write, with permissions by the umask.

    safetensors creates files that only their owner can read.
    """
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
    try:
        partial.touch(exist_ok=False)
        permissions = stat.S_IMODE(partial.stat().st_mode)
        # Transformers requires the metadata entry `format`.
        import_safetensors().numpy.save_file(dict(tensors), partial, metadata={"format": "pt"})
        partial.chmod(permissions)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _split(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > limit:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def _shard_name(number: int, count: int) -> str:
    return WEIGHTS if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
