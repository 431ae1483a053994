"""Folders of arrays that TensorStore wrote, opened as stores of keys such as `params.w/.zarray`."""

from __future__ import annotations

import os
import urllib.parse
from typing import TYPE_CHECKING, Any

from etils import epath

from layerkit_runner.files.atomic_write import is_remote
from layerkit_runner.files.bounded_documents import parse_json

if TYPE_CHECKING:
    import tensorstore as ts

METADATA_KEY = ".zarray"


def open_store(state_directory: epath.Path, *, is_ocdbt: bool) -> ts.KvStore:
    """Open a folder of arrays: an OCDBT database, or else one folder for each array."""
    import tensorstore as ts

    text = os.fspath(state_directory)
    base = f"{text if is_remote(text) else f'file://{urllib.parse.quote(text)}'}".rstrip("/") + "/"
    return ts.KvStore.open({"driver": "ocdbt", "base": base} if is_ocdbt else base).result()


def read_metadata(store: ts.KvStore, array: str) -> dict[str, Any]:
    """Return the Zarr metadata of an array; raise ValueError if they are malformed."""
    try:
        metadata = parse_json(store[f"{array}/{METADATA_KEY}".encode()].decode())
    except KeyError:
        raise ValueError(f"{METADATA_KEY} is missing") from None
    if not isinstance(metadata, dict):
        raise ValueError(f"{METADATA_KEY} is no JSON object")
    return metadata
