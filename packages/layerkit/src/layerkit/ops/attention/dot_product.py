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

from layerkit.base.sharding import BoundSharding, model_device
from layerkit.config.checks import check_choice
from layerkit.errors import ConfigError
from layerkit.ops.attention.backends import (
    GPU_PLATFORMS,
    AttentionCall,
    select_backend,
)
from layerkit.ops.attention.causal_blocks import attend_by_causal_blocks, uses_causal_blocks
from layerkit.ops.attention.context_parallel import (
    CONTEXT_PARALLEL_NAMES,
    gather_keys,
    ulysses_attention,
)
from layerkit.ops.attention.cudnn import cudnn_attention, has_cudnn
from layerkit.ops.attention.distance_bias import DistanceBias, LogitBias
from layerkit.ops.attention.masks import AttentionMask
from layerkit.ops.attention.sharded_kernel import (
    find_split_problem,
    run_kernel_on_mesh,
)
from layerkit.ops.attention.xla import xla_attention

if TYPE_CHECKING:
    from layerkit.ops.attention.ring import PartAttention

_LOG = logging.getLogger("layerkit.attention")


def dot_product_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    mask: AttentionMask | None = None,
    scale: float,
    bias: LogitBias | None = None,
    sinks: jax.Array | None = None,
    logit_cap: float | None = None,
    dropout: Callable[[jax.Array], jax.Array] | None = None,
    zero_fully_masked_rows: bool = False,
    backend: str = "auto",
    platform: str | None = None,
    sharding: BoundSharding | None = None,
    context_parallel: str = "all_gather",
    kernel_blocks: tuple[int, int] | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Compute the attention output of each query.

    Args:
      query: `[batch, queries, heads, head_dim]`.
      key: `[batch, keys, kv_heads, head_dim]`; kv_heads divides heads.
      value: `[batch, keys, kv_heads, value_dim]`.
      mask: Mask of the (query, key) pairs that may attend; None for all pairs.
      scale: Factor of the products of queries and keys.
      bias: `[batch or 1, heads or 1, queries, keys]`, or a bias by distance for a mask in row
        order, added to the scaled products before the cap.
      sinks: `[heads]`, a logit per head that takes probability and adds no value (attention sinks;
        Xiao et al., 2023, arXiv:2309.17453, learned as in gpt-oss). It is not capped.
      logit_cap: Bound of the logits, which tanh squeezes into ±logit_cap; None for no bound.
      dropout: Function that drops probabilities, applied in the dtype of `value`.
      zero_fully_masked_rows: True for an output of exactly 0 where a query may attend no key;
        otherwise it is the mean of all values, or 0 in kernels. With `sinks`, which then take all
        probability, it is 0 in all cases.
      backend: `auto`, `xla`, `cudnn` or `pallas`; see `layerkit.ops.attention.backends`.
      platform: JAX's name of the platform that runs it; None for that of the mesh, of `sharding` or
        of a surrounding `jax.shard_map`, or without a mesh JAX's default.
      sharding: Sharding of the model for attention of whole rows: kernels run on the rows and
        heads of each device, and `context_parallel` applies to rows that are split over devices.
        None leaves the split to the compiler, as is best for cached steps.
      context_parallel: `all_gather`, `ring` or `ulysses`; see
        `layerkit.ops.attention.context_parallel`. It has an effect if the rule of `length`
        splits rows.
      kernel_blocks: Largest number of (queries, keys) in a block of a Pallas kernel, powers of two
        of at least 16, and 128 on TPUs; None for the kernel's own.
      interpret: True to run the Pallas kernel of `platform` in interpret mode on any device. This
        is slow and meant for tests.

    Returns:
      `[batch, queries, heads, value_dim]` in the dtype of `value`.

    Raises:
      ConfigError: Shapes are incompatible, rows cannot be split evenly, or the backend or kind of
        context parallelism is unknown.
      UnsupportedBackendError: The backend or the kind of context parallelism does not support this
        attention.
    """
    _check_shapes(query, key, value, mask)
    _check_bias_and_sinks(query, key, bias, sinks, mask)
    check_choice(None, CONTEXT_PARALLEL_NAMES, context_parallel=context_parallel)
    if sharding is not None and context_parallel == "ulysses" and sharding.num_shards("length") > 1:
        attend = functools.partial(
            dot_product_attention,
            mask=mask,
            scale=scale,
            bias=bias,
            sinks=sinks,
            logit_cap=logit_cap,
            dropout=dropout,
            zero_fully_masked_rows=zero_fully_masked_rows,
            backend=backend,
            platform=platform,
            kernel_blocks=kernel_blocks,
            interpret=interpret,
        )
        return ulysses_attention(attend, query, key, value, sharding=sharding)
    platform = platform or str(model_device(sharding).platform)
    call = describe_call(
        query,
        key,
        value,
        mask=mask,
        bias=bias,
        sinks=sinks,
        logit_cap=logit_cap,
        dropout=dropout,
        zero_fully_masked_rows=zero_fully_masked_rows,
        platform=platform,
        sharding=sharding,
        context_parallel=context_parallel,
    )
    chosen = select_backend(backend, call)
    _LOG.info(chosen.describe())
    kernel_options: dict[str, Any] = {"blocks": kernel_blocks, "interpret": interpret}
    if chosen.name == "pallas":
        kernel_options["device_kind"] = model_device(sharding).device_kind
    if sharding is not None and call.uses_ring:
        from layerkit.ops.attention.ring import ring_attention

        return ring_attention(
            query,
            key,
            value,
            mask=mask,
            attention=_part_attention(chosen.name, platform, scale, logit_cap, **kernel_options),
            sharding=sharding,
            sinks=sinks,
        )
    if isinstance(bias, DistanceBias) and chosen.name != "pallas":
        bias = bias.dense()
    arrays = {"sinks": sinks, "logit_cap": logit_cap, "bias": bias}
    options: dict[str, Any] = {name: array for name, array in arrays.items() if array is not None}
    options |= {"mask": mask, "scale": scale}
    in_blocks = chosen.name == "xla" and uses_causal_blocks(call, sharding)
    # The count of model FLOPs halves the products in the causal scope; blocks have their own.
    with jax.named_scope("causal_attention" if call.is_causal and not in_blocks else "attention"):
        if sharding is not None and call.num_length_shards > 1:
            query, key, value = gather_keys(query, key, value, sharding)
        if chosen.name == "xla":
            array_code: Callable[..., jax.Array] = (
                attend_by_causal_blocks if in_blocks else xla_attention
            )
            return array_code(
                query,
                key,
                value,
                dropout=dropout,
                zero_fully_masked_rows=zero_fully_masked_rows,
                **options,
            )
        kernel = _kernel(chosen.name, platform, **kernel_options)
        if chosen.name == "pallas" and platform == "tpu" and call.num_length_shards > 1:
            options["prepare"] = _sharded_splash_kernel(
                query, key, mask=mask, logit_cap=logit_cap, sharding=sharding, **kernel_options
            )
        return run_kernel_on_mesh(kernel, query, key, value, sharding=sharding, **options)


def describe_call(
    query: jax.Array | jax.ShapeDtypeStruct,
    key: jax.Array | jax.ShapeDtypeStruct,
    value: jax.Array | jax.ShapeDtypeStruct,
    *,
    mask: AttentionMask | None = None,
    bias: LogitBias | jax.ShapeDtypeStruct | None = None,
    sinks: jax.Array | jax.ShapeDtypeStruct | None = None,
    logit_cap: float | None = None,
    dropout: Callable[[jax.Array], jax.Array] | None = None,
    zero_fully_masked_rows: bool = False,
    platform: str | None = None,
    sharding: BoundSharding | None = None,
    context_parallel: str = "all_gather",
) -> AttentionCall:
    """Return the input of `select_backend` for arguments of `dot_product_attention`.

    Only the shape and dtype of arrays are read.

    Args:
      query: `[batch, queries, heads, head_dim]`.
      key: `[batch, keys, kv_heads, head_dim]`.
      value: `[batch, keys, kv_heads, value_dim]`.
      mask: Mask of the (query, key) pairs that may attend; None for all pairs.
      bias: `[batch or 1, heads or 1, queries, keys]`, or a bias by distance.
      sinks: `[heads]`.
      logit_cap: Bound of the logits.
      dropout: Function that drops probabilities.
      zero_fully_masked_rows: True for 0 where a query may attend no key.
      platform: JAX's name of the platform; None for that of the mesh, or JAX's default.
      sharding: Sharding of the model; None if nothing is split.
      context_parallel: `all_gather` or `ring`. Under `ulysses`, attention is called with whole
        rows and another sharding.
    """
    platform = platform or str(model_device(sharding).platform)
    num_shards = 1 if sharding is None else sharding.num_shards("length")
    return AttentionCall(
        platform=platform,
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
        has_sinks=sinks is not None,
        has_logit_cap=logit_cap is not None,
        has_dropout=dropout is not None,
        zeroes_empty_rows=zero_fully_masked_rows,
        num_length_shards=num_shards,
        uses_ring=num_shards > 1 and context_parallel == "ring",
        split_problem="" if sharding is None else find_split_problem(query, key, sharding),
        has_cudnn=platform in GPU_PLATFORMS and has_cudnn(),
    )


def _kernel(name: str, platform: str, **options: Any) -> Callable[..., jax.Array]:
    """Return the fused kernel of a backend. Pallas is imported only if it is used."""
    if name == "cudnn":
        return cudnn_attention
    if platform == "tpu":
        from layerkit.ops.attention.pallas.flash_tpu import flash_attention_tpu

        return functools.partial(flash_attention_tpu, **options)
    from layerkit.ops.attention.pallas.flash_gpu import flash_attention_gpu

    return functools.partial(flash_attention_gpu, **options)


def _part_attention(
    name: str, platform: str, scale: float, logit_cap: float | None, **options: Any
) -> PartAttention:
    """Return the attention of a ring to a part of the keys."""
    if name == "xla":
        from layerkit.ops.attention.blockwise import BlockwiseAttention

        return BlockwiseAttention(scale, logit_cap)
    if platform == "tpu":
        from layerkit.ops.attention.pallas.flash_tpu import SplashPartAttention

        return SplashPartAttention(scale, logit_cap, **options)
    from layerkit.ops.attention.pallas.flash_gpu import FlashPartAttention

    return FlashPartAttention(scale, logit_cap, **options)


def _sharded_splash_kernel(
    query: jax.Array, key: jax.Array, *, sharding: BoundSharding | None, **options: Any
) -> Callable[[], Any]:
    """Return a function that makes the TPU kernel, which `run_kernel_on_mesh` shards."""
    from layerkit.ops.attention.pallas.flash_tpu import splash_kernel

    assert sharding is not None
    return functools.partial(
        splash_kernel, query=query, key=key, num_shards=sharding.num_shards("length"), **options
    )


def _check_shapes(
    query: jax.Array, key: jax.Array, value: jax.Array, mask: AttentionMask | None
) -> None:
    _require_shape(
        "query", query, query.ndim == 4, "[batch, queries, heads, head_dim], with 4 dimensions"
    )
    batch, queries, heads, head_dim = query.shape
    fits = key.ndim == 4 and (key.shape[0], key.shape[3]) == (batch, head_dim)
    _require_shape(
        "key",
        key,
        fits and heads % key.shape[2] == 0,
        f"[{batch}, keys, a divisor of {heads}, {head_dim}] for a query of {list(query.shape)}",
    )
    _require_shape(
        "value",
        value,
        value.ndim == 4 and value.shape[:3] == key.shape[:3],
        f"[{', '.join(map(str, key.shape[:3]))}, value_dim] for a key of {list(key.shape)}",
    )
    if mask is None:
        return
    # XLA would broadcast a mask of another length, or fail without naming it.
    shapes = (
        ("query_positions", mask.query_positions, queries),
        ("key_positions", mask.key_positions, key.shape[1]),
    )
    for name, positions, length in shapes:
        rows = positions.shape[0]
        fits = positions.shape[-1] == length and rows in (1, batch)
        _require_shape(f"mask.{name}", positions, fits, f"[{batch} or 1, {length}]")


def _check_bias_and_sinks(
    query: jax.Array,
    key: jax.Array,
    bias: LogitBias | None,
    sinks: jax.Array | None,
    mask: AttentionMask | None,
) -> None:
    (batch, queries, heads, _), keys = query.shape, key.shape[1]
    if isinstance(bias, DistanceBias):
        if mask is not None and not mask.in_row_order:
            expected = "True with a bias by distance"
            raise ConfigError(
                "attention", field="mask.in_row_order", value=False, expected=expected
            )
        _require_shape("query", query, queries == keys, f"{keys} queries, as many as keys")
        shape = (1, heads, 2 * keys - 1)
        is_valid = bias.by_distance.shape == shape
        _require_shape("bias.by_distance", bias.by_distance, is_valid, str(list(shape)))
    elif bias is not None:
        fits = bias.ndim == 4 and bias.shape[0] in (1, batch) and bias.shape[1] in (1, heads)
        expected = f"[{batch} or 1, {heads} or 1, {queries}, {keys}]"
        _require_shape("bias", bias, fits and bias.shape[2:] == (queries, keys), expected)
    if sinks is not None:
        _require_shape("sinks", sinks, sinks.shape == (heads,), f"[{heads}], one per head")


def _require_shape(name: str, array: jax.Array, fits: Any, expected: str) -> None:
    if not fits:
        field, shape = f"shape of {name}", list(array.shape)
        raise ConfigError("attention", field=field, value=shape, expected=expected)
