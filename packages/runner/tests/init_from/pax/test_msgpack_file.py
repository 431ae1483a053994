"""Files in Flax's format, and files that only look like one."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from etils import epath
from flax import serialization

from layerkit_runner.checkpointing import DamagedCheckpointError
from layerkit_runner.init_from.pax import tree_text
from layerkit_runner.init_from.pax.paxml_folders import read_msgpack

TREE = "PyTreeDef(CustomNode(TrainState[()], [*, {'params': {'a': *, 'b': *}}, [(*, None)], ()]))"


def test_arrays_of_flax_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    rng = np.random.default_rng(0)
    leaves = [
        np.uint32(7),
        rng.normal(size=(3, 4)).astype(np.float32),
        rng.normal(size=5).astype("bfloat16"),
        rng.integers(0, 9, size=(2, 0)),
    ]
    # Flax splits arrays above MAX_CHUNK_SIZE (1 GiB), which this test lowers to 16 bytes.
    monkeypatch.setattr(serialization, "MAX_CHUNK_SIZE", 16)
    state = {str(i): leaf for i, leaf in enumerate(leaves)}
    path = tmp_path / "checkpoint"
    path.write_bytes(
        serialization.msgpack_serialize({"flattened_state": state, "str_pytree_state": TREE})
    )
    arrays = read_msgpack(epath.Path(path))
    names = ("step", "mdl_vars/params/a", "mdl_vars/params/b", "opt_states/0/0")
    assert tuple(arrays.specs) == names
    for name, leaf in zip(names, leaves, strict=True):
        array = arrays.read(name, arrays.by_name[name])
        assert array.dtype == leaf.dtype
        np.testing.assert_array_equal(array, leaf)


def array_of(shape: Any, dtype: str, content: bytes) -> bytes:
    return msgpack.packb(msgpack.ExtType(1, msgpack.packb((shape, dtype, content))))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xdd" + struct.pack(">I", 2**32 - 1),
        b"\xc6" + struct.pack(">I", 2**31) + b"x",
        b"\x91" * 2000 + b"\x01",
        b"\xc1",
        array_of([2**40], "float32", b"1234"),
        array_of([-1], "float32", b""),
        array_of([1], "object", b"12345678"),
        array_of([1], "no_dtype", b"1234"),
        msgpack.packb(msgpack.ExtType(2, b"\x01")),
    ],
)
def test_malformed_file_is_an_error(tmp_path: Path, content: bytes):
    path = epath.Path(tmp_path / "checkpoint")
    path.write_bytes(content)
    with pytest.raises(DamagedCheckpointError, match="a msgpack file of Flax"):
        read_msgpack(path)


def test_tree_text_names_leaves():
    text = (
        "PyTreeDef({'a': [*, None, CustomNode(namedtuple[ScaleByAdamState], [*, {'w': *}, (*,)])],"
        " 'b': CustomNode(NestedMap[('x', 'y')], [*, CustomNode(namedtuple[MaskedNode], [])])})"
    )
    assert ["/".join(path) for path in tree_text.leaf_paths(text)] == [
        *("a/0", "a/2/count", "a/2/mu/w", "a/2/nu/0"),
        "b/x",
    ]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "PyTreeDef()",
        "PyTreeDef(*",
        "PyTreeDef(* *)",
        "PyTreeDef({'a': })",
        "PyTreeDef({a: *})",
        "PyTreeDef([*, __import__('os')])",
        "PyTreeDef(" + "[" * 200 + "]" * 200 + ")",
    ],
)
def test_malformed_tree_text_is_an_error(text: str):
    with pytest.raises(ValueError, match="expected|levels|unexpected"):
        tree_text.leaf_paths(text)
