"""The provenance of decoded outputs and evaluation records: what determined their content.

A step number does not identify the weights: outputs may come from another folder's checkpoint,
another temperature or other prompts. So each output file has a provenance file in the same folder.
It holds a digest of the weights, and the settings of model, seed and data set as text. Mesh, batch
size and the number of processes are left out, although random numbers may depend on them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from layerkit_inputs.base.base_input import BaseInput
from layerkit_runner.files.atomic_write import atomic_write, read_regular
from layerkit_runner.files.text import stable_repr
from layerkit_runner.partitioning import Partitioner
from layerkit_runner.step.task import SingleTask
from layerkit_runner.step.train_state import TrainState

# Fields of an input that depend on devices and processes, or that only name the data set.
_HOST_FIELDS = frozenset(
    {
        *("name", "batch_size", "percore_batch_size", "batch_padding_size"),
        *("infeed_host_index", "num_infeed_hosts"),
    }
)
_BITS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}


def describe_settings(task: SingleTask, dataset: BaseInput | None) -> dict[str, Any]:
    """Return the settings of model, seed and data set as JSON values.

    A data set that evaluations reset (`reset_for_eval`) is reset first.
    """
    model = {
        "model settings": stable_repr(task.model.clone(train=False, sharding=None)),
        "random seed": task.train.random_seed,
        "random numbers": task.train.prng_impl,
    }
    if (seed := task.train.decode_random_seed) is not None:
        model["random seed of decoding"] = seed
    if dataset is None:
        return model
    if dataset.reset_for_eval:
        dataset.reset()
    fields = [f.name for f in dataclasses.fields(dataset) if f.init and f.name not in _HOST_FIELDS]
    values = {name: stable_repr(getattr(dataset, name)) for name in fields}
    position = dataset.get_state()["position"]
    return {**model, "data": {"class": type(dataset).__qualname__, **values, "state": position}}


def weights_digest_fn(task: SingleTask, partitioner: Partitioner) -> Callable[[TrainState], str]:
    """Return a function that computes a digest of a state's weights and step.

    It is the same on every mesh, detects mistakes, and does not protect against manipulation.
    """

    def leaf_sums(state: TrainState) -> jax.Array:
        state = task.decoded_state(state)
        read = (state.params, state.non_trainable, state.overwrite_with_gradient, state.step)
        return jnp.stack([_digest_sum(leaf) for leaf in jax.tree.leaves(read)])

    sums = partitioner.jit_reading(task, leaf_sums)

    def digest(state: TrainState) -> str:
        numbers = np.asarray(sums(state), "<u4")
        return hashlib.sha256(numbers.tobytes()).hexdigest()[:16]

    return digest


def read_provenance(outputs: epath.Path) -> dict[str, Any]:
    """Return the recorded provenance of an output file; empty if it is missing or damaged."""
    try:
        provenance = json.loads(read_regular(_provenance_path(outputs)))
    except (OSError, ValueError):
        return {}
    return provenance if isinstance(provenance, dict) else {}


def write_outputs(
    outputs: epath.Path, text: str, provenance: dict[str, Any], *, npz: bytes | None = None
) -> None:
    """Write outputs, then their provenance, which a kill between the two leaves out.

    `npz` is the content of the `.npz` file of the outputs' arrays; None deletes such a file.
    """
    _provenance_path(outputs).unlink(missing_ok=True)
    if npz is None:
        npz_path(outputs).unlink(missing_ok=True)
    else:
        atomic_write(npz_path(outputs), npz)
    atomic_write(outputs, text)
    atomic_write(_provenance_path(outputs), json.dumps(provenance, indent=2) + "\n")


def npz_path(outputs: epath.Path) -> epath.Path:
    """Return the path of the `.npz` file that holds the large arrays of an output file."""
    return outputs.parent / f"{outputs.stem}.npz"


def _provenance_path(outputs: epath.Path) -> epath.Path:
    return outputs.parent / f"{outputs.stem}.made_from.json"


def _digest_sum(leaf: jax.Array) -> jax.Array:
    """Return the uint32 sum of each element's bits times a random number of its position."""
    if leaf.dtype == jnp.bool_:
        leaf = leaf.astype(jnp.uint8)
    bits = jax.lax.bitcast_convert_type(leaf, _BITS[leaf.dtype.itemsize]).astype(jnp.uint32)
    factors = jax.random.bits(jax.random.key(0), bits.shape) | jnp.uint32(1)
    return jnp.sum((bits ^ (bits >> 16)) * factors, dtype=jnp.uint32)
