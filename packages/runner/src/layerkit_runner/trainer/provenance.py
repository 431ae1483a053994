"""What decoded outputs were made from, so that finished ones are never taken for others.

A step number does not say which weights those were: a folder can be decoded with the checkpoint of
another, with another temperature or other prompts. Beside each file of outputs stands what decides
them: a digest of the weights, and the text of model, seed and data set. How the work was spread
(mesh, batch size, processes) does not count, though random numbers may depend on it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from layerkit_inputs.base_input import BaseInput
from layerkit_runner.files.atomic_write import atomic_write
from layerkit_runner.partitioning import Partitioner
from layerkit_runner.training.task import SingleTask
from layerkit_runner.training.train_state import TrainState

# What is decided by the devices and processes at hand, or only names things.
_PLACE_FIELDS = frozenset(
    {
        "name",
        "batch_size",
        "percore_batch_size",
        "infeed_host_index",
        "num_infeed_hosts",
        "batch_padding_size",
    }
)
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_BITS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}


def describe_settings(task: SingleTask, dataset: BaseInput | None) -> dict[str, Any]:
    """Model, seed and data set as JSON values; a data set read from its start is put there."""
    model = {
        "model settings": _text(task.model.clone(train=False, sharding=None)),
        "random seed": task.train.random_seed,
        "random numbers": task.train.prng_impl,
    }
    if dataset is None:
        return model
    if dataset.reset_for_eval:
        dataset.reset()
    state = dataset.get_state()
    fields = [f.name for f in dataclasses.fields(dataset) if f.init]
    values = {name: _text(getattr(dataset, name)) for name in fields if name not in _PLACE_FIELDS}
    return {
        **model,
        "data": {"class": type(dataset).__qualname__, **values, "state": state["position"]},
    }


def weights_digest_fn(task: SingleTask, partitioner: Partitioner) -> Callable[[TrainState], str]:
    """A function from a state to a digest of its weights and step.

    Every device reads its own part and none is moved, so the digest is the same on any mesh. It
    tells apart what may be confused by mistake; it is no protection against intent.
    """

    def leaf_sums(state: TrainState) -> jax.Array:
        state = task.decoded_state(state)
        read = (state.params, state.non_trainable, state.overwrite_with_gradient, state.step)
        leaves = jax.tree.leaves(read)
        return jnp.stack([_mixed_sum(leaf) for leaf in leaves])

    sums = partitioner.jit_reading(task, leaf_sums)

    def digest(state: TrainState) -> str:
        numbers = np.asarray(sums(state), "<u4")
        return hashlib.sha256(numbers.tobytes()).hexdigest()[:16]

    return digest


def read_made_from(outputs: epath.Path) -> dict[str, Any]:
    """What these outputs were made from; empty where nothing says so."""
    path = _path_beside(outputs)
    return json.loads(path.read_text()) if path.exists() else {}


def write_with_made_from(
    outputs: epath.Path, text: str, made_from: dict[str, Any], *, npz: bytes | None = None
) -> None:
    """Write outputs and what they were made from; killed in between, outputs of unknown origin.

    Args:
      outputs: The file of the records.
      text: Its content.
      made_from: What decides the content.
      npz: Content of the file of arrays beside it; None for no such file.
    """
    _path_beside(outputs).unlink(missing_ok=True)
    if npz is None:
        npz_beside(outputs).unlink(missing_ok=True)
    else:
        atomic_write(npz_beside(outputs), npz)
    atomic_write(outputs, text)
    atomic_write(_path_beside(outputs), json.dumps(made_from, indent=2) + "\n")


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """The names of the parts that differ."""
    # Through JSON, since what was read has lists where there were tuples.
    now = json.loads(json.dumps(now))
    return [name for name in now if before.get(name) != now[name]]


def npz_beside(outputs: epath.Path) -> epath.Path:
    """Return the path of the large arrays that belong to a file of records."""
    return outputs.parent / f"{outputs.stem}.npz"


def _path_beside(outputs: epath.Path) -> epath.Path:
    return outputs.parent / f"{outputs.stem}.made_from.json"


def _text(value: Any) -> str:
    # Addresses differ from run to run and say nothing.
    return _ADDRESS.sub("", repr(value))


def _mixed_sum(leaf: jax.Array) -> jax.Array:
    """uint32: the sum over all elements of bits mixed with position, the same in any order."""
    if leaf.dtype == jnp.bool_:
        leaf = leaf.astype(jnp.uint8)
    bits = jax.lax.bitcast_convert_type(leaf, _BITS[leaf.dtype.itemsize]).astype(jnp.uint32)
    position = jnp.zeros((), jnp.uint32)
    for axis in range(bits.ndim):
        index = jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
        position = position * jnp.uint32(bits.shape[axis]) + index
    return jnp.sum(_mix(bits ^ _mix(position + jnp.uint32(1))), dtype=jnp.uint32)


def _mix(x: jax.Array) -> jax.Array:
    """The finalizer of MurmurHash3 (Appleby): each bit of the input reaches all of the output."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
