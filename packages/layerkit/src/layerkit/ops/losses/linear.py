"""Losses of hidden states: the product with the head and the losses of its logits in one pass.

The logits of a language model are its largest array. `map_logits` holds those of one chunk of the
tokens at a time. The mean of the losses keeps its gradients from the forward pass, since only a
factor of all of them comes later (Hsu et al., 2024, Liger Kernel, arXiv:2410.10989). Losses with a
gradient of each token of its own, such as those of preferences, need a second pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from layerkit.base.sharding import BoundSharding


@jax.custom_jvp
def class_logits(hidden: jax.Array, weight: jax.Array) -> jax.Array:
    """Multiply hidden states by the vector of every class, accumulated in float32.

    Args:
      hidden: `[..., dims]`.
      weight: `[num_classes, dims]` in the dtype of `hidden`.

    Returns:
      Logits `[..., num_classes]`, float32.
    """
    return jnp.einsum("...d,vd->...v", hidden, weight, preferred_element_type=jnp.float32)


# JAX would multiply the float32 gradient of bfloat16 logits by bfloat16 operands, which no
# accelerator does at full speed. This derivative has the dtype of the operands, so the backward
# pass rounds the gradient to that dtype first.
@class_logits.defjvp
def _class_logits_jvp(
    primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    (hidden, weight), (hidden_dot, weight_dot) = primals, tangents
    tangent = jnp.einsum("...d,vd->...v", hidden_dot, weight)
    tangent += jnp.einsum("...d,vd->...v", hidden, weight_dot)
    return class_logits(hidden, weight), tangent.astype(jnp.float32)


class TokenChunks(NamedTuple):
    """A split of tokens `[batch, length]` into chunks, in each of which every device has its own.

    Attributes:
      num_chunks: Number of chunks.
      axes: Logical axes of rows, positions and classes.
      vector_axes: Logical axes of the head's vectors `[num_classes, dims]`, as they are stored.
      sharding: Sharding of the model.
    """

    num_chunks: int = 1
    axes: tuple[str | None, ...] = (None, None, None)
    vector_axes: tuple[str | None, ...] = (None, None)
    sharding: BoundSharding = BoundSharding(None)

    @property
    def shards(self) -> list[int]:
        """Numbers of shards of rows, positions and classes."""
        return [self.sharding.num_shards(name or "") for name in self.axes]

    def split(self, x: jax.Array) -> jax.Array:
        """Split `[batch, length, ...]` into `[chunk, row_shard, position_shard, tokens, ...]`.

        A chunk takes every num_chunks-th position, so that a sharded length stays where it is.
        """
        rest = x.shape[2:]
        rows, in_rows, columns, in_columns, num = sizes = self._sizes(*x.shape[:2])
        padding = columns * in_columns * num - x.shape[1]
        x = jnp.pad(x, [(0, 0), (0, padding), *[(0, 0)] * len(rest)]).reshape(*sizes, *rest)
        x = jnp.moveaxis(x, (4, 0, 2), (0, 1, 2))
        x = x.reshape(num, rows, columns, in_rows * in_columns, *rest)
        return self.sharding.constrain(x, (None, *self.axes[:2], *[None] * (x.ndim - 3)))

    def join(self, x: jax.Array, batch: int, length: int) -> jax.Array:
        """Undo `split`: return `[batch, length, ...]`."""
        rest = x.shape[4:]
        rows, in_rows, columns, in_columns, num = self._sizes(batch, length)
        x = x.reshape(num, rows, columns, in_rows, in_columns, *rest)
        x = jnp.moveaxis(x, (0, 1, 2), (4, 0, 2))
        return x.reshape(batch, columns * in_columns * num, *rest)[:, :length]

    def _sizes(self, batch: int, length: int) -> tuple[int, int, int, int, int]:
        rows, columns, num = *self.shards[:2], self.num_chunks
        return rows, batch // rows, columns, math.ceil(length / (num * columns)), num


def map_logits(
    function: Callable[..., tuple[jax.Array, Any]],
    hidden: jax.Array,
    head: tuple[jax.Array, jax.Array | None],
    weights: jax.Array,
    *arrays: jax.Array,
    chunks: TokenChunks,
) -> tuple[jax.Array, Any]:
    """Return the weighted sum of losses, a float32 scalar, and outputs `[batch, length, ...]`.

    Args:
      function: Function from float32 products with the head plus the bias, `[..., tokens,
        num_classes]`, and chunks of `arrays` to losses `[..., tokens]` and a tree of outputs
        `[..., tokens, ...]`. It computes each token separately.
      hidden: `[batch, length, dims]` in the compute dtype.
      head: Vectors of the classes, `[num_classes, dims]`, and a bias `[num_classes]` or None. Their
        gradients are summed in float32.
      weights: Float32 `[batch, length]`. A token of weight 0 does not count, even if its loss is
        NaN.
      *arrays: Arrays `[batch, length, ...]` without gradients.
      chunks: Split of the tokens.
    """
    axes = [jax.typeof(x).manual_axis_type.varying for x in (hidden, head[0])]
    if missing := tuple(axes[0] - axes[1]):
        # Within `shard_map`, gradients of the head are sums over the shards of the tokens.
        head = jax.tree.map(lambda x: jax.lax.pcast(x, missing, to="varying"), head)

    @jax.custom_vjp
    def run(*inputs: Any) -> tuple[jax.Array, Any]:
        return _scan_chunks(function, inputs, {}, chunks)[0]

    def forward(*primals: Any) -> tuple[tuple[jax.Array, Any], Any]:
        inputs = jax.tree.map(lambda x: x.value, primals)
        ones = jnp.ones_like(inputs[2])
        results, gradients = _scan_chunks(function, inputs, {0: ones}, chunks)
        return results, (inputs, gradients)

    def backward(residuals: Any, cotangents: tuple[Any, Any]) -> tuple[Any, ...]:
        inputs, gradients = residuals
        present = {
            number: x
            for number, x in enumerate(jax.tree.leaves(cotangents))
            if not isinstance(x, SymbolicZero) and x.dtype != jax.dtypes.float0
        }
        factor = present.pop(0, jnp.float32(0))
        if present:
            present[0] = jnp.full_like(inputs[2], factor)
            _, gradients = _scan_chunks(function, inputs, present, chunks)
        else:
            gradients = jax.tree.map(lambda x: factor * x, gradients)
        return *jax.tree.map(lambda x, like: x.astype(like.dtype), gradients, inputs[:3]), None

    run.defvjp(forward, backward, symbolic_zeros=True)
    results: tuple[jax.Array, Any] = run(hidden, head, weights, jax.lax.stop_gradient(arrays))
    return results


def _scan_chunks(
    function: Callable[..., Any], inputs: Any, cotangents: dict[int, jax.Array], chunks: TokenChunks
) -> tuple[Any, tuple[jax.Array, tuple[jax.Array, jax.Array | None], jax.Array]]:
    """Return the results of `map_logits`, and the gradients of hidden, head and weights.

    `inputs` are those of `map_logits`, and `cotangents` the gradients `[batch, length, ...]` of the
    weighted losses (0) and of the leaves of the outputs (from 1).
    """
    hidden, (vectors, bias), weights, arrays = inputs
    vocab = chunks.axes[2]
    vectors = chunks.sharding.constrain(vectors.astype(hidden.dtype), (chunks.vector_axes[0], None))

    def zeros_of_shards(x: jax.Array, *axes: str | None) -> jax.Array:
        zeros = jnp.zeros_like(x, jnp.float32)
        zeros = jnp.broadcast_to(zeros, (*chunks.shards[:2], *x.shape))
        return chunks.sharding.constrain(zeros, (*chunks.axes[:2], *axes))

    def run_chunk(sums: Any, chunk: Any) -> tuple[Any, Any]:
        hidden, weights, arrays, cotangents = chunk

        def weigh_losses(logits: jax.Array, weights: jax.Array) -> tuple[list[jax.Array], Any]:
            losses, outputs = function(logits, *arrays)
            results = jnp.where(weights != 0, losses, 0.0) * weights, outputs
            leaves = jax.tree.leaves(results)
            return [leaves[number] for number in cotangents], results

        logits = class_logits(hidden, vectors)
        logits = logits if bias is None else logits + bias.astype(jnp.float32)
        _, pull, results = jax.vjp(weigh_losses, logits, weights, has_aux=True)
        by_logit, by_weight = pull([*cotangents.values()])
        by_bias = None if bias is None else jnp.sum(by_logit, axis=-2)
        by_logit = by_logit.astype(hidden.dtype)
        by_hidden = jnp.einsum("...v,vd->...d", by_logit, vectors)
        # GPUs add the sum so far within this product.
        by_vector = jnp.einsum(
            "...tv,...td->...dv", by_logit, hidden, preferred_element_type=jnp.float32
        )
        sums = jax.tree.map(jnp.add, sums, (by_vector, by_bias))
        return sums, (results, by_hidden, by_weight)

    # The sums of each shard of the tokens are added after the last chunk.
    by_bias = None if bias is None else zeros_of_shards(bias, vocab)
    zeros = zeros_of_shards(vectors.T, None, vocab), by_bias
    parts = jax.tree.map(chunks.split, (hidden, weights, arrays, cotangents))
    sums, by_chunk = jax.lax.scan(run_chunk, zeros, parts)
    (losses, outputs), *by_token = jax.tree.map(lambda x: chunks.join(x, *weights.shape), by_chunk)
    # With one axis of shards, one reduction adds over both of their mesh axes.
    by_vector, by_bias = jax.tree.map(lambda x: jnp.sum(x.reshape(-1, *x.shape[2:]), axis=0), sums)
    # A whole sum would be several times as large as the logits of a chunk. The dimensions, over
    # which weights are mostly sharded, come first, since a reduce-scatter copies others.
    by_vector = chunks.sharding.constrain(by_vector, chunks.vector_axes[::-1]).T
    return (jnp.sum(losses), outputs), (by_token[0], (by_vector, by_bias), by_token[1])
