"""Attention as a function of queries, keys, values and a mask.

softmax(scale · q·k + bias) · v (Vaswani et al., 2017, arXiv:1706.03762), with grouped queries
(Ainslie et al., 2023, arXiv:2305.13245): query head h reads key head h // group, where group is the
number of query heads per key head. Keys are not repeated.

This module checks the shapes, lets `layerkit.ops.attention.backends` select the backend, and
calls it, on the shard of each device if the model is split over devices.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax

from layerkit.base.sharding import model_device
from layerkit.config.checks import require
from layerkit.ops.attention.backends import (
    GPU_PLATFORMS,
    AttentionCall,
    select_backend,
)
from layerkit.ops.attention.causal_blocks import attend_by_causal_blocks, uses_causal_blocks
from layerkit.ops.attention.context_parallel import gather_keys, ulysses_attention
from layerkit.ops.attention.cudnn import cudnn_attention, has_cudnn
from layerkit.ops.attention.distance_bias import DistanceBias
from layerkit.ops.attention.options import AttentionOptions
from layerkit.ops.attention.sharded_kernel import (
    find_split_problem,
    run_kernel_on_mesh,
)
from layerkit.ops.attention.xla import xla_attention

if TYPE_CHECKING:
    from layerkit.ops.attention.ring import PartAttention

_LOG = logging.getLogger("layerkit.attention")


def dot_product_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, options: AttentionOptions
) -> jax.Array:
    """Compute the attention output of each query.

    Args:
      query: `[batch, queries, heads, head_dim]`.
      key: `[batch, keys, kv_heads, head_dim]`; kv_heads divides heads.
      value: `[batch, keys, kv_heads, value_dim]`.
      options: Mask, scale, bias and the other options.

    Returns:
      `[batch, queries, heads, value_dim]` in the dtype of `value`.

    Raises:
      ConfigError: Shapes are incompatible, rows cannot be split evenly, or the backend is unknown.
      UnsupportedBackendError: The backend or the kind of context parallelism does not support this
        attention.
    """
    _check_shapes(query, key, value, options)
    if options.context_parallel == "ulysses" and options.num_length_shards > 1:
        return ulysses_attention(dot_product_attention, query, key, value, options)
    call = describe_call(query, key, value, options)
    chosen = select_backend(options.backend, call)
    _LOG.info(chosen.describe())
    sharding = options.sharding
    if sharding is not None and call.uses_ring:
        from layerkit.ops.attention.ring import ring_attention

        return ring_attention(
            query,
            key,
            value,
            mask=options.mask,
            attention=_part_attention(chosen.name, options),
            sharding=sharding,
            sinks=options.sinks,
        )
    in_blocks = chosen.name == "xla" and uses_causal_blocks(call, sharding)
    # The count of model FLOPs halves the products in the causal scope; blocks have their own.
    with jax.named_scope("causal_attention" if call.is_causal and not in_blocks else "attention"):
        if sharding is not None and call.num_length_shards > 1:
            query, key, value = gather_keys(query, key, value, sharding)
        if in_blocks:
            return attend_by_causal_blocks(query, key, value, options)
        if chosen.name == "xla":
            return xla_attention(query, key, value, options)
        return _run_kernel(chosen.name, query, key, value, options)


def describe_call(
    query: jax.Array | jax.ShapeDtypeStruct,
    key: jax.Array | jax.ShapeDtypeStruct,
    value: jax.Array | jax.ShapeDtypeStruct,
    options: AttentionOptions,
) -> AttentionCall:
    """Return the input of `select_backend` for arguments of `dot_product_attention`.

    Only the shape and dtype of arrays are read. Under `ulysses`, attention is called with whole
    rows and another sharding.

    Args:
      query: `[batch, queries, heads, head_dim]`.
      key: `[batch, keys, kv_heads, head_dim]`.
      value: `[batch, keys, kv_heads, value_dim]`.
      options: Mask, scale, bias and the other options.
    """
    mask, bias, sharding = options.mask, options.bias, options.sharding
    num_shards = options.num_length_shards
    return AttentionCall(
        platform=options.platform,
        dtype=query.dtype,
        head_dim=query.shape[-1],
        value_dim=value.shape[-1],
        num_queries=query.shape[1],
        num_keys=key.shape[1],
        is_causal=mask is not None and mask.causal,
        is_in_row_order=mask is None or mask.in_row_order,
        window=None if mask is None else mask.window,
        has_segments=mask is not None and mask.query_segments is not None,
        has_prefix=mask is not None and mask.key_in_prefix is not None,
        bias_dtype=None if bias is None else jax.tree.leaves(bias)[0].dtype,
        has_distance_bias=isinstance(bias, DistanceBias),
        has_sinks=options.sinks is not None,
        has_logit_cap=options.logit_cap is not None,
        has_dropout=options.dropout is not None,
        zeroes_empty_rows=options.zero_fully_masked_rows,
        num_length_shards=num_shards,
        uses_ring=num_shards > 1 and options.context_parallel == "ring",
        split_problem="" if sharding is None else find_split_problem(query, key, sharding),
        has_cudnn=options.platform in GPU_PLATFORMS and has_cudnn(),
    )


def _run_kernel(
    name: str, query: jax.Array, key: jax.Array, value: jax.Array, options: AttentionOptions
) -> jax.Array:
    """Run the fused kernel of a backend. Pallas is imported only if it is used."""
    arrays = {"sinks": options.sinks, "logit_cap": options.logit_cap, "bias": options.bias}
    if name == "cudnn":
        arrays["bias"] = options.dense_bias
    arguments: dict[str, Any] = {name: array for name, array in arrays.items() if array is not None}
    if name == "cudnn":
        kernel: Callable[..., jax.Array] = cudnn_attention
    elif options.platform == "tpu":
        from layerkit.ops.attention.pallas.flash_tpu import flash_attention_tpu, splash_kernel

        kernel = functools.partial(flash_attention_tpu, **_kernel_options(options))
        if options.num_length_shards > 1:
            # It makes the TPU kernel, which `run_kernel_on_mesh` shards.
            arguments["prepare"] = functools.partial(
                splash_kernel,
                query=query,
                key=key,
                mask=options.mask,
                logit_cap=options.logit_cap,
                num_shards=options.num_length_shards,
                **_kernel_options(options),
            )
    else:
        from layerkit.ops.attention.pallas.flash_gpu import flash_attention_gpu

        kernel = functools.partial(flash_attention_gpu, **_kernel_options(options))
    return run_kernel_on_mesh(
        kernel,
        query,
        key,
        value,
        sharding=options.sharding,
        mask=options.mask,
        scale=options.scale,
        **arguments,
    )


def _kernel_options(options: AttentionOptions) -> dict[str, Any]:
    return {
        "blocks": options.kernel_blocks,
        "interpret": options.interpret,
        "device_kind": model_device(options.sharding).device_kind,
    }


def _part_attention(name: str, options: AttentionOptions) -> PartAttention:
    """Return the attention of a ring to a part of the keys."""
    scale, logit_cap = options.scale, options.logit_cap
    if name == "xla":
        from layerkit.ops.attention.blockwise import BlockwiseAttention

        return BlockwiseAttention(scale, logit_cap)
    if options.platform == "tpu":
        from layerkit.ops.attention.pallas.flash_tpu import SplashPartAttention

        return SplashPartAttention(scale, logit_cap, **_kernel_options(options))
    from layerkit.ops.attention.pallas.flash_gpu import FlashPartAttention

    return FlashPartAttention(scale, logit_cap, **_kernel_options(options))


def _check_shapes(
    query: jax.Array, key: jax.Array, value: jax.Array, options: AttentionOptions
) -> None:
    """Raise `ConfigError` for shapes that would broadcast, or fail without naming the array."""
    (batch, queries, heads, head_dim), (keys, kv_heads) = query.shape, key.shape[1:3]
    mask, bias, sinks, rows = options.mask, options.bias, options.sinks, {1, batch}
    shapes: list[tuple[str, Any, list[tuple[int, ...]]]] = [
        ("key", key, [(batch, keys, kv_heads, head_dim)] if heads % kv_heads == 0 else []),
        ("value", value, [(batch, keys, kv_heads, value.shape[-1])]),
    ]
    if mask is not None:
        shapes += [
            ("mask.query_positions", mask.query_positions, [(n, queries) for n in rows]),
            ("mask.key_positions", mask.key_positions, [(n, keys) for n in rows]),
        ]
    if isinstance(bias, DistanceBias):
        shapes += [
            ("query", query, [(batch, keys, heads, head_dim)]),
            ("bias.by_distance", bias.by_distance, [(1, heads, 2 * keys - 1)]),
        ]
        in_row_order = mask is None or mask.in_row_order
        expected = "True with a bias by distance"
        require(in_row_order, "attention", "mask.in_row_order", in_row_order, expected)
    elif bias is not None:
        shapes.append(("bias", bias, [(n, h, queries, keys) for n in rows for h in {1, heads}]))
    if sinks is not None:
        shapes.append(("sinks", sinks, [(heads,)]))
    for name, array, allowed in shapes:
        expected = " or ".join(str(list(sizes)) for sizes in sorted(allowed))
        expected = expected or f"key heads that divide {heads} query heads"
        field, shape = f"shape of {name}", list(array.shape)
        require(array.shape in allowed, "attention", field, shape, expected)
