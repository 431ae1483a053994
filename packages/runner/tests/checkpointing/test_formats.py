"""The single-file format."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import msgpack
import numpy as np
import pytest
from etils import epath
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from layerkit.errors import ConfigError
from layerkit_runner.checkpointing import stored_state


def mesh():
    return jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))


LEAVES = {
    ("b",): np.arange(8).astype(jnp.bfloat16),
    ("flag",): np.array([True, False] * 4),
    ("f8",): np.arange(8).astype(jnp.float8_e4m3fn),
    ("n", "int4"): np.arange(8).astype(jnp.int4),
    ("n", "step"): np.asarray(2**31 - 1, np.int32),
    ("w",): np.arange(8 * 5, dtype=np.float32).reshape(8, 5).T,  # not contiguous
}


@pytest.mark.parametrize("piece_bytes", [7, 1 << 20])
def test_every_dtype_is_restored_bit_for_bit_from_pieces_of_any_size(
    tmp_path, monkeypatch, piece_bytes
):
    directory = epath.Path(tmp_path)
    monkeypatch.setattr(stored_state, "_PIECE_BYTES", piece_bytes)
    stored_state.write_msgpack(directory, LEAVES)
    monkeypatch.undo()
    assert stored_state.msgpack_leaves(directory) == {
        path: stored_state.spec_of(leaf) for path, leaf in LEAVES.items()
    }
    whole = NamedSharding(mesh(), P())
    targets = {
        path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole)
        for path, leaf in LEAVES.items()
    }
    restored = stored_state.read_msgpack(directory, targets)
    for path, leaf in LEAVES.items():
        assert restored[path].dtype == leaf.dtype
        assert np.asarray(restored[path]).tobytes() == leaf.tobytes()


def test_the_file_can_be_read_with_msgpack_and_numpy_alone(tmp_path):
    stored_state.write_msgpack(epath.Path(tmp_path), {("a", "b"): np.arange(6.0).reshape(2, 3)})
    with (tmp_path / "state.msgpack").open("rb") as file:
        header, data = msgpack.Unpacker(file)
    assert header == {
        "format": "layerkit-state",
        "version": 1,
        "leaves": [{"path": ["a", "b"], "shape": [2, 3], "dtype": "float64"}],
    }
    np.testing.assert_array_equal(np.frombuffer(data, "<f8"), np.arange(6.0))


def test_later_version_is_an_error(raises, tmp_path):
    header = {"format": "layerkit-state", "version": 2, "leaves": []}
    (tmp_path / "state.msgpack").write_bytes(msgpack.packb(header))
    with raises(ConfigError, field="version of layerkit-state", value=2):
        stored_state.msgpack_leaves(epath.Path(tmp_path))


def test_sharded_leaf_is_never_written_as_a_single_file():
    split = jax.device_put(jnp.ones(8), NamedSharding(mesh(), P("data")))
    with pytest.raises(AssertionError, match="opt/mu is sharded"):
        stored_state.host_copy({("opt", "mu"): split})


def test_host_copy_does_not_share_the_device_buffer():
    array = jax.device_put(jnp.zeros(1024), NamedSharding(mesh(), P()))
    copy = stored_state.host_copy({("a",): array})[("a",)]
    assert not np.shares_memory(copy, np.asarray(array.addressable_data(0)))
