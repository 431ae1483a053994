"""Attention itself, as a plain function of queries, keys, values and a mask.

softmax(scale · q·k + bias) · v (Vaswani et al., 2017, arXiv:1706.03762), with grouped queries
(Ainslie et al., 2023, arXiv:2305.13245): query head h reads key head h // group, where group is the
number of query heads to a key head. Keys are not repeated for it.

This file checks the shapes, lets `backends` choose who computes it, and calls that backend, on each
device's share where the model is split over several.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import jax

from layerkit.layers.attention.backends import (
    GPU_PLATFORMS,
    AttentionCall,
    select_backend,
)
from layerkit.layers.attention.context_parallel import (
    check_context_parallel,
    gather_keys,
    num_length_parts,
    ring_attention,
)
from layerkit.layers.attention.cudnn import cudnn_attention, has_cudnn
from layerkit.layers.attention.sharded_kernel import on_each_device, split_obstacle
from layerkit.layers.attention.xla import xla_attention
from layerkit.layers.masks import AttentionMask
from layerkit.sharding import BoundSharding

_LOG = logging.getLogger("layerkit.attention")


def dot_product_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    mask: AttentionMask | None = None,
    scale: float,
    bias: jax.Array | None = None,
    sinks: jax.Array | None = None,
    logit_cap: float | None = None,
    dropout: Callable[[jax.Array], jax.Array] | None = None,
    zero_fully_masked_rows: bool = False,
    backend: str = "auto",
    platform: str | None = None,
    sharding: BoundSharding | None = None,
    context_parallel: str = "all_gather",
    interpret: bool = False,
) -> jax.Array:
    """What each query reads.

    Args:
      query: `[batch, queries, heads, head_dim]`.
      key: `[batch, keys, kv_heads, head_dim]`, where kv_heads divides heads.
      value: `[batch, keys, kv_heads, value_dim]`.
      mask: Which query may attend which key; None for all.
      scale: Multiplies the products of queries and keys.
      bias: `[batch or 1, heads or 1, queries, keys]`, added to the scaled products before the cap.
      sinks: `[heads]`, a logit per head that takes probability and gives nothing (attention sinks;
        Xiao et al., 2023, arXiv:2309.17453, learned as in gpt-oss); it is not capped.
      logit_cap: Squeezes the logits into ±logit_cap; None leaves them alone.
      dropout: Applied to the probabilities, in the dtype of `value`.
      zero_fully_masked_rows: A query that may attend no key gives exactly 0; without it, the mean
        of all values. With `sinks`, which then take all probability, it gives 0 either way.
      backend: `auto`, `xla`, `cudnn` or `pallas`; see `layerkit.layers.attention.backends`.
      platform: Where it will run; None for that of the mesh, or else JAX's default.
      sharding: The model's, where whole rows are attended: kernels then run on each device's rows
        and heads, and rows split over devices are attended as `context_parallel` says. None leaves
        it to the compiler, which is right for cached steps.
      context_parallel: `all_gather` or `ring`; see `layerkit.layers.attention.context_parallel`. It
        matters where the rule of `length` splits rows.
      interpret: Runs the Pallas kernel of `platform` step by step on any device: for tests, since
        it is slow.

    Returns:
      `[batch, queries, heads, value_dim]` in the dtype of `value`.

    Raises:
      ValueError: shapes that do not fit, rows that cannot be split evenly, an unknown backend or
        way of context parallelism.
      BackendRefusal: a backend that cannot do this.
    """
    _check_shapes(query, key, value, mask)
    _check_extras(query, key, bias, sinks)
    check_context_parallel(context_parallel)
    platform = platform or _platform_of(sharding)
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
    options: dict[str, Any] = {"mask": mask, "scale": scale}
    if sinks is not None:
        options["sinks"] = sinks
    if logit_cap is not None:
        options["logit_cap"] = logit_cap
    # The count of model FLOPs takes half of what it finds in the causal scope.
    is_causal = mask is not None and mask.causal
    with jax.named_scope("causal_attention" if is_causal else "attention"):
        if sharding is not None and call.length_parts > 1:
            if context_parallel == "ring":
                return ring_attention(query, key, value, sharding=sharding, **options)
            query, key, value = gather_keys(query, key, value, sharding)
        if bias is not None:
            options["bias"] = bias
        if chosen.name == "xla":
            return xla_attention(
                query,
                key,
                value,
                dropout=dropout,
                zero_fully_masked_rows=zero_fully_masked_rows,
                **options,
            )
        kernel = _kernel(chosen.name, platform, interpret=interpret)
        if chosen.name == "pallas" and platform == "tpu" and call.length_parts > 1:
            options["prepare"] = _splash_in_parts(
                query, key, mask=mask, logit_cap=logit_cap, interpret=interpret, sharding=sharding
            )
        return on_each_device(kernel, query, key, value, sharding=sharding, **options)


def describe_call(
    query: jax.Array | jax.ShapeDtypeStruct,
    key: jax.Array | jax.ShapeDtypeStruct,
    value: jax.Array | jax.ShapeDtypeStruct,
    *,
    mask: AttentionMask | None = None,
    bias: jax.Array | jax.ShapeDtypeStruct | None = None,
    sinks: jax.Array | jax.ShapeDtypeStruct | None = None,
    logit_cap: float | None = None,
    dropout: Callable[[jax.Array], jax.Array] | None = None,
    zero_fully_masked_rows: bool = False,
    platform: str | None = None,
    sharding: BoundSharding | None = None,
    context_parallel: str = "all_gather",
) -> AttentionCall:
    """What `select_backend` decides by, for arguments of `dot_product_attention`.

    Args:
      query: `[batch, queries, heads, head_dim]`; of arrays, only shape and dtype are read.
      key: `[batch, keys, kv_heads, head_dim]`.
      value: `[batch, keys, kv_heads, value_dim]`.
      mask: This and the others as in `dot_product_attention`.
    """
    platform = platform or _platform_of(sharding)
    length_parts = 1 if sharding is None else num_length_parts(sharding)
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
        bias_dtype=None if bias is None else bias.dtype,
        has_sinks=sinks is not None,
        has_logit_cap=logit_cap is not None,
        has_dropout=dropout is not None,
        zeroes_empty_rows=zero_fully_masked_rows,
        length_parts=length_parts,
        is_in_a_ring=length_parts > 1 and context_parallel == "ring",
        split_obstacle="" if sharding is None else split_obstacle(query, key, sharding),
        has_cudnn=platform in GPU_PLATFORMS and has_cudnn(),
    )


def _kernel(name: str, platform: str, *, interpret: bool) -> Callable[..., jax.Array]:
    """The fused kernel of a backend; Pallas is imported only where it is used."""
    if name == "cudnn":
        return cudnn_attention
    if platform == "tpu":
        from layerkit.layers.attention.flash_tpu import flash_attention_tpu

        return functools.partial(flash_attention_tpu, interpret=interpret)
    from layerkit.layers.attention.flash_gpu import flash_attention_gpu

    return functools.partial(flash_attention_gpu, interpret=interpret)


def _splash_in_parts(
    query: jax.Array, key: jax.Array, *, sharding: BoundSharding | None, **options: Any
) -> Callable[[], Any]:
    """Makes the TPU kernel of whole rows for `on_each_device` to share out."""
    from layerkit.layers.attention.flash_tpu import splash_kernel

    assert sharding is not None
    return functools.partial(
        splash_kernel, query=query, key=key, num_parts=num_length_parts(sharding), **options
    )


def _platform_of(sharding: BoundSharding | None) -> str:
    if sharding is None or sharding.mesh is None:
        return jax.default_backend()
    # The mesh may be of machines that are only planned for.
    platform: str = sharding.mesh.devices.flat[0].platform
    return platform


def _check_shapes(
    query: jax.Array, key: jax.Array, value: jax.Array, mask: AttentionMask | None
) -> None:
    shapes = f"query {query.shape}, key {key.shape}, value {value.shape}"
    if not query.ndim == key.ndim == value.ndim == 4 or key.shape[:3] != value.shape[:3]:
        raise ValueError(
            f"{shapes}: expected query [batch, queries, heads, head_dim], key"
            " [batch, keys, kv_heads, head_dim] and value [batch, keys, kv_heads, value_dim]"
        )
    if query.shape[0] != key.shape[0] or query.shape[3] != key.shape[3]:
        raise ValueError(f"{shapes}: batch and head_dim must be the same in all")
    if query.shape[2] % key.shape[2]:
        raise ValueError(f"{shapes}: kv_heads={key.shape[2]} must divide heads={query.shape[2]}")
    if mask is None:
        return
    # A mask of another length would be broadcast, or fail inside XLA without a name.
    found = mask.query_positions.shape[-1], mask.key_positions.shape[-1]
    if found != (query.shape[1], key.shape[1]):
        raise ValueError(
            f"{shapes}: the mask is for {found[0]} queries and {found[1]} keys, expected"
            f" {query.shape[1]} and {key.shape[1]}"
        )
    rows = {mask.query_positions.shape[0], mask.key_positions.shape[0]}
    if not rows <= {1, query.shape[0]}:
        raise ValueError(
            f"{shapes}: the mask is for a batch of {max(rows)}, expected {query.shape[0]} or 1"
        )


def _check_extras(
    query: jax.Array, key: jax.Array, bias: jax.Array | None, sinks: jax.Array | None
) -> None:
    batch, queries, heads, _ = query.shape
    if bias is not None:
        fits = bias.ndim == 4 and bias.shape[0] in (1, batch) and bias.shape[1] in (1, heads)
        if not fits or bias.shape[2:] != (queries, key.shape[1]):
            raise ValueError(
                f"bias of shape {bias.shape}: expected [batch or 1, heads or 1, queries, keys] ="
                f" [{batch} or 1, {heads} or 1, {queries}, {key.shape[1]}]"
            )
    if sinks is not None and sinks.shape != (heads,):
        raise ValueError(f"sinks of shape {sinks.shape}: expected [heads] = [{heads}]")
