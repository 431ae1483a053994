"""Writing of tensors into safetensors files of limited size, with their index."""

from __future__ import annotations

import secrets
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from layerkit.interop.hugging_face.folder import INDEX, WEIGHTS, import_safetensors, write_json


def write_shards(
    folder: Path,
    sizes: Mapping[str, int],
    tensors: Iterator[np.ndarray],
    *,
    max_shard_bytes: int,
) -> None:
    """Write tensors, of which one file is held at a time, and remove older ones from the folder.

    Args:
      folder: Existing folder.
      sizes: Bytes of each tensor by name.
      tensors: The tensors `[...]`, in the order of `sizes`.
      max_shard_bytes: Largest size of a file; a larger tensor has a separate file.
    """
    shards: list[list[str]] = [[]]
    left = max_shard_bytes
    for name, size in sizes.items():
        if shards[-1] and size > left:
            shards.append([])
            left = max_shard_bytes
        shards[-1].append(name)
        left -= size
    count = len(shards)
    files = [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
    files = [WEIGHTS] if count == 1 else files
    for file, names in zip(files, shards, strict=True):
        held = {name: np.ascontiguousarray(next(tensors)) for name in names}
        _replace_file(folder / file, held)
    # A single file next to an older index would be two models, of which readers load one.
    (folder / INDEX).unlink(missing_ok=True)
    for stale in (*folder.glob("model-?????-of-?????.safetensors"), folder / WEIGHTS):
        if stale.name not in files:
            stale.unlink(missing_ok=True)
    if count > 1:
        file_of = {n: file for file, names in zip(files, shards, strict=True) for n in names}
        metadata = {"total_size": sum(sizes.values())}
        write_json(folder, INDEX, {"metadata": metadata, "weight_map": file_of})


def _replace_file(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
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
