"""Restoring a part of a state, and with other dtypes."""

from __future__ import annotations

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from layerkit_runner.checkpointing import (
    CheckpointManager,
    ProcessCountError,
    StateFormat,
    StructureMismatchError,
    integrity,
)

WEIGHTS = np.linspace(-3, 3, 32, dtype=np.float32).reshape(8, 4)
CAST = "converted 1 array from float32 to bfloat16"


def sharding() -> NamedSharding:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    return NamedSharding(mesh, P("data"))


def leaf(shape, dtype) -> jax.ShapeDtypeStruct:
    over = sharding()
    return jax.ShapeDtypeStruct(
        shape, dtype, sharding=over if shape else NamedSharding(over.mesh, P())
    )


@pytest.fixture(scope="module", params=list(StateFormat))
def written(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("written")
    state = {
        "params": {"w": jnp.asarray(WEIGHTS)},
        "opt_state": {"mu": jnp.asarray(WEIGHTS), "nu": jnp.asarray(WEIGHTS)},
        "step": jnp.int32(3),
    }
    with CheckpointManager(directory, state_format=request.param) as manager:
        manager.save(3, state, input_states={"train": {"file": 1}}, metadata={}, force=True)
    return directory


def target_of(dtype=jnp.float32, *, with_opt_state=True):
    """Return a target whose weight has a dtype."""
    moment = leaf((8, 4), jnp.float32)
    opt_state = {"opt_state": {"mu": moment, "nu": moment}} if with_opt_state else {}
    return {"params": {"w": leaf((8, 4), dtype)}, **opt_state, "step": leaf((), jnp.int32)}


def restore(directory, target, lines=None, **options):
    report = (lambda line: None) if lines is None else lines.append
    with CheckpointManager(directory, read_only=True, report=report) as manager:
        return manager.restore(3, target, **options)


def test_left_out_parts_are_not_compared_or_read(raises, written):
    target = target_of(with_opt_state=False)
    with raises(StructureMismatchError, owner=f"The checkpoint {written}/checkpoint_00000003"):
        restore(written, target)
    result = restore(written, target, leave_out=("opt_state",))
    assert set(result.state) == {"params", "step"}
    np.testing.assert_array_equal(result.state["params"]["w"], WEIGHTS)
    assert result.state["params"]["w"].sharding == sharding()
    # What is left must still fit.
    target["params"]["v"] = leaf((8, 4), jnp.float32)
    with pytest.raises(StructureMismatchError, match="params/v: missing in the checkpoint"):
        restore(written, target, leave_out=("opt_state",))


def test_input_states_are_restored_only_for_training(raises, written, tmp_path):
    # A job of two processes, each of which read files of its own.
    directory = tmp_path / "job"
    shutil.copytree(written, directory)
    inputs = directory / "checkpoint_00000003/input_states"
    (inputs / "process_00000_of_00001.json").rename(inputs / "process_00000_of_00002.json")
    integrity.write(epath.Path(inputs.parent))
    target = target_of(with_opt_state=False)
    with raises(ProcessCountError, field="number of processes", value=1):
        restore(directory, target, leave_out=("opt_state",))
    result = restore(directory, target, leave_out=("opt_state",), with_input_states=False)
    assert result.input_states == {}


def test_floating_point_dtypes_are_cast_only_if_set(written):
    difference = "params/w: dtype float32 in the checkpoint, expected bfloat16"
    with pytest.raises(StructureMismatchError, match="--restore_cast_dtypes") as error:
        restore(written, target_of(jnp.bfloat16))
    assert error.value.differences == (difference,)
    lines: list[str] = []
    result = restore(written, target_of(jnp.bfloat16), lines, cast_dtypes=True)
    assert lines == [f"The checkpoint {written}/checkpoint_00000003: {CAST}"]
    ours = result.state["params"]["w"]
    assert (ours.dtype, ours.sharding) == (jnp.bfloat16, sharding())
    assert np.asarray(ours).tobytes() == WEIGHTS.astype(jnp.bfloat16).tobytes()
    np.testing.assert_array_equal(result.state["opt_state"]["mu"], WEIGHTS)


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.float8_e4m3fn])
def test_integers_and_eight_bit_floats_are_never_cast(written, dtype):
    with pytest.raises(StructureMismatchError, match="dtype float32 in the checkpoint"):
        restore(written, target_of(dtype), cast_dtypes=True)
