"""Attention as a function of queries, keys, values and a mask.

softmax(scale · q·k + bias) · v (Vaswani et al., 2017, arXiv:1706.03762), with grouped queries
(Ainslie et al., 2023, arXiv:2305.13245): query head h reads key head h // group, where group is the
number of query heads per key head. Keys are not repeated.

`dot_product_attention` checks the shapes, lets `layerkit.ops.attention.backends` select the
backend, and calls it, on the shard of each device if the model is split over devices. The backend
`xla` is array code, below. It supports every option and platform and holds the logits in memory.
Its logits and softmax are float32 for inputs of every dtype. A masked logit becomes a large finite
negative number rather than -inf, so that the softmax and gradient of a fully masked row are finite.

Within a window, array code runs by blocks of long rows (`layerkit.ops.attention.local_blocks`).

On a single CPU, array code runs causal attention by blocks of queries, each multiplied with the
keys up to its last query only. With four blocks this leaves out three eighths of the products,
logits and exponentials, which are all masked. Each block is compiled separately, so that more
blocks cost more than they save.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from layerkit.base.sharding import BoundSharding, is_single_cpu, model_device
from layerkit.config.checks import require
from layerkit.errors import ConfigError
from layerkit.ops.attention.backends import AttentionCall, BackendName, select_backend
from layerkit.ops.attention.distance_bias import DistanceBias, LogitBias
from layerkit.ops.attention.local_blocks import attend_by_local_blocks, find_local_block
from layerkit.ops.attention.masks import MASKED_LOGIT, AttentionMask, count_visible_pairs
from layerkit.ops.attention.sharded_kernel import (
    find_split_problem,
    run_kernel_on_mesh,
    split_key_heads,
)
from layerkit.ops.implementations import Implementation
from layerkit.ops.soft_cap import soft_cap

ContextParallel = Literal["all_gather", "ring", "ulysses"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionOptions:
    """How queries attend to keys, and what computes it.

    Attributes:
      scale: Factor of the products of queries and keys.
      mask: Mask of the (query, key) pairs that may attend; None for all pairs.
      bias: `[batch or 1, heads or 1, queries, keys]`, or a bias by distance for a mask in row
        order, added to the scaled products before the cap.
      sinks: `[heads]`, a logit per head that takes probability and adds no value (attention sinks;
        Xiao et al., 2023, arXiv:2309.17453, learned as in gpt-oss). It is not capped.
      prompts: Keys and values `[prompts, prompt_keys, kv_heads, dims]`, each of which the rows of a
        prompt, batch / prompts in sequence, attend besides their own; None for none. In `mask` and
        `bias` they precede the own keys. Only `xla` supports them.
      logit_cap: Bound of the logits, which tanh squeezes into ±logit_cap; None for no bound.
      dropout: Function that drops probabilities, applied in the dtype of the values.
      zero_fully_masked_rows: True for an output of exactly 0 where a query may attend no key;
        otherwise it is the mean of all values, or 0 in kernels. With `sinks`, which then take all
        probability, it is 0 in all cases.
      backend: `auto`, `xla`, `cudnn`, `tokamax` or `pallas`; see `layerkit.ops.attention.backends`.
      platform: JAX's name of the platform that runs it; "" for that of the mesh, of `sharding` or
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
    """

    scale: float = 1.0
    mask: AttentionMask | None = None
    bias: LogitBias | None = None
    sinks: jax.Array | None = None
    prompts: tuple[jax.Array, jax.Array] | None = None
    logit_cap: float | None = None
    dropout: Callable[[jax.Array], jax.Array] | None = None
    zero_fully_masked_rows: bool = False
    backend: BackendName = "auto"
    platform: str = ""
    sharding: BoundSharding | None = None
    context_parallel: ContextParallel = "all_gather"
    kernel_blocks: tuple[int, int] | None = None
    interpret: bool = False

    def __post_init__(self) -> None:
        """Set the platform."""
        if not self.platform:
            platform = str(model_device(self.sharding).platform)
            object.__setattr__(self, "platform", platform)

    @property
    def num_length_shards(self) -> int:
        """Number of devices over which the length of a row is split."""
        return 1 if self.sharding is None else self.sharding.num_shards("length")

    @property
    def dense_bias(self) -> jax.Array | None:
        """The bias as an array `[batch or 1, heads or 1, queries, keys]`; None without a bias."""
        return self.bias.dense() if isinstance(self.bias, DistanceBias) else self.bias


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
    sharding = options.sharding
    is_split = options.num_length_shards > 1
    if sharding is not None and is_split and options.context_parallel == "ulysses":
        from layerkit.ops.attention.context_parallel import ulysses_attention

        def attend(
            query: jax.Array, key: jax.Array, value: jax.Array, to: BoundSharding
        ) -> jax.Array:
            whole_rows = dataclasses.replace(options, sharding=to)
            return dot_product_attention(query, key, value, whole_rows)

        return ulysses_attention(attend, query, key, value, sharding)
    if sharding is not None:
        key, value, sharding = split_key_heads(query, key, value, sharding)
        options = dataclasses.replace(options, sharding=sharding)
    call = describe_call(query, key, value, options)
    chosen = select_backend(options.backend, call)
    if sharding is not None and call.uses_ring:
        from layerkit.ops.attention.ring import ring_attention

        return ring_attention(
            query,
            key,
            value,
            mask=options.mask,
            attention=_kernel(chosen, options),
            sharding=sharding,
            sinks=options.sinks,
        )
    local_block = find_local_block(call) if chosen.name == "xla" else None
    if local_block is not None:
        with jax.named_scope("attention"):
            return attend_by_local_blocks(
                query, key, value, options, attend=xla_attention, size=local_block
            )
    in_blocks = chosen.name == "xla" and uses_causal_blocks(call, sharding)
    with jax.named_scope(_scope_of_counts(call, chosen.name, in_blocks=in_blocks)):
        if sharding is not None and is_split:
            from layerkit.ops.attention.context_parallel import gather_keys

            query, key, value = gather_keys(query, key, value, sharding)
        if in_blocks:
            return attend_by_causal_blocks(query, key, value, options)
        if chosen.name == "xla":
            return xla_attention(query, key, value, options)
        return _run_kernel(chosen, query, key, value, options)


def describe_call(
    query: jax.Array | jax.ShapeDtypeStruct,
    key: jax.Array | jax.ShapeDtypeStruct,
    value: jax.Array | jax.ShapeDtypeStruct,
    options: AttentionOptions,
) -> AttentionCall:
    """Return the input of `select_backend` for arguments of `dot_product_attention`.

    Only the shape and dtype of arrays `[...]` are read. Under `ulysses`, attention is called with
    whole rows and another sharding.
    """
    mask, bias, sharding = options.mask, options.bias, options.sharding
    num_shards, device = options.num_length_shards, model_device(sharding)
    return AttentionCall(
        platform=options.platform,
        device_kind=device.device_kind,
        compute_capability=getattr(device, "compute_capability", ""),
        dtype=query.dtype,
        has_mixed_dtypes=not query.dtype == key.dtype == value.dtype,
        head_dim=query.shape[-1],
        value_dim=value.shape[-1],
        num_queries=query.shape[1],
        num_keys=key.shape[1],
        is_causal=mask is not None and mask.causal,
        is_in_row_order=mask is None or mask.in_row_order,
        window=None if mask is None else mask.window,
        reach=None if mask is None else mask.reach,
        chunk=None if mask is None else mask.chunk,
        has_segments=mask is not None and mask.query_segments is not None,
        segments_are_runs=mask is None or mask.segments_are_runs,
        has_prefix=mask is not None and mask.reads_ahead,
        bias_dtype=None if bias is None else jax.tree.leaves(bias)[0].dtype,
        has_distance_bias=isinstance(bias, DistanceBias),
        has_sinks=options.sinks is not None,
        has_logit_cap=options.logit_cap is not None,
        has_dropout=options.dropout is not None,
        zeroes_empty_rows=options.zero_fully_masked_rows,
        num_length_shards=num_shards,
        uses_ring=num_shards > 1 and options.context_parallel == "ring",
        split_problem="" if sharding is None else find_split_problem(query, key, sharding),
    )


def _scope_of_counts(call: AttentionCall, backend: str, *, in_blocks: bool) -> str:
    """Return the name by which counts of FLOPs leave out hidden pairs of queries and keys."""
    length, reach = call.num_keys, call.reach
    # On TPUs, blocks outside a window are not in the kernel's grid, whose cells are counted.
    is_counted = backend == "xla" or call.platform != "tpu"
    # A symbolic length has no order.
    is_known = isinstance(length, int) and call.is_self_attention and is_counted
    if reach is None or not is_known or max(reach) >= length - 1:
        # Blocks of queries have their own scope.
        return "causal_attention" if call.is_causal and not in_blocks else "attention"
    num_pairs = count_visible_pairs(length, reach, call.chunk)
    num_computed = length**2 * (_NUM_BLOCKS + 1) // (2 * _NUM_BLOCKS) if in_blocks else length**2
    return f"rows_{num_pairs}_of_{num_computed}"


def _run_kernel(
    chosen: Implementation[AttentionCall],
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    options: AttentionOptions,
) -> jax.Array:
    """Run the fused kernel of a backend on the shard of each device."""
    kernel, prepare, num_shards = _kernel(chosen, options), None, options.num_length_shards
    if options.platform == "tpu" and num_shards > 1:
        prepare = functools.partial(kernel.kernel, query, key, options.mask, num_shards=num_shards)
    return run_kernel_on_mesh(
        kernel,
        query,
        key,
        value,
        sharding=options.sharding,
        mask=options.mask,
        sinks=options.sinks,
        bias=options.bias if chosen.name == "pallas" else options.dense_bias,
        prepare=prepare,
    )


def _kernel(chosen: Implementation[AttentionCall], options: AttentionOptions) -> Any:
    kind = model_device(options.sharding).device_kind
    fields = options.scale, options.logit_cap, options.kernel_blocks, kind, options.interpret
    return chosen.load()(*fields)


def _check_shapes(
    query: jax.Array, key: jax.Array, value: jax.Array, options: AttentionOptions
) -> None:
    """Raise `ConfigError` for shapes that would broadcast, or fail without naming the array."""
    (batch, queries, heads, head_dim), (keys, kv_heads) = query.shape, key.shape[1:3]
    mask, bias, sinks = options.mask, options.bias, options.sinks
    # Sizes may be symbolic, which have no order.
    rows, bias_heads = dict.fromkeys((1, batch)), dict.fromkeys((1, heads))

    def check(name: str, array: Any, *allowed: tuple[int, ...]) -> None:
        if array.shape not in allowed:
            expected = " or ".join(str(list(sizes)) for sizes in allowed)
            raise ConfigError(
                owner="attention",
                field=f"shape of {name}",
                value=list(array.shape),
                expected=expected,
            )

    expected = f"key heads that divide {heads} query heads"
    require(heads % kv_heads == 0, "attention", "shape of key", list(key.shape), expected)
    check("key", key, (batch, keys, kv_heads, head_dim))
    check("value", value, (batch, keys, kv_heads, value.shape[-1]))
    if options.prompts is not None:
        backend = options.backend
        require(backend == "xla", "attention", "backend", backend, "xla with `prompts`")
        keys += options.prompts[0].shape[1]
    if mask is not None:
        check("mask.query_positions", mask.query_positions, *((n, queries) for n in rows))
        check("mask.key_positions", mask.key_positions, *((n, keys) for n in rows))
    if isinstance(bias, DistanceBias):
        check("query", query, (batch, keys, heads, head_dim))
        check("bias.by_distance", bias.by_distance, (1, heads, 2 * keys - 1))
        in_row_order = mask is None or mask.in_row_order or mask.num_ahead > 0
        expected = "True with a bias by distance"
        require(in_row_order, "attention", "mask.in_row_order", in_row_order, expected)
    elif bias is not None:
        check("bias", bias, *((n, h, queries, keys) for n in rows for h in bias_heads))
    if sinks is not None:
        check("sinks", sinks, (heads,))


def xla_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, options: AttentionOptions
) -> jax.Array:
    """Compute `dot_product_attention` by array code: `[batch, queries, heads, value_dim]`.

    Mask, scale, bias, sinks, prompts, cap and dropout have an effect; other options have none.
    """
    batch, queries, heads, _ = query.shape
    # With heads first, the products batch over leading axes alone, and XLA's CPU backend holds
    # fewer transposed copies for the backward pass.
    query, key, value = (jnp.swapaxes(x, 1, 2) for x in (query, key, value))
    score = functools.partial(_scaled_logits, scale=options.scale)
    logits = score(query, key)
    if options.prompts is not None:
        prompt_key, prompt_value = (jnp.swapaxes(x, 1, 2) for x in options.prompts)
        logits = jnp.concatenate([_apply_to_samples(score, query, prompt_key), logits], axis=-1)
    bias = options.dense_bias
    if bias is not None:
        logits += _group_heads(bias, kv_heads=key.shape[1])
    probabilities = _masked_softmax(soft_cap(logits, options.logit_cap), options)
    probabilities = probabilities.astype(value.dtype)
    if options.dropout is not None:
        probabilities = options.dropout(probabilities)
    average = functools.partial(jnp.einsum, "bngqk,bnkd->bngqd")
    if options.prompts is None:
        read = average(probabilities, value)
    else:
        shared, own = jnp.split(probabilities, [prompt_key.shape[2]], axis=-1)
        read = _apply_to_samples(average, shared, prompt_value) + average(own, value)
    return jnp.swapaxes(read.reshape(batch, heads, queries, value.shape[-1]), 1, 2)


def _apply_to_samples(
    function: Callable[..., jax.Array], x: jax.Array, shared: jax.Array
) -> jax.Array:
    """Apply a function to `x` `[prompts · samples, …]` and `shared` `[prompts, …]`."""
    by_prompt = x.reshape(shared.shape[0], -1, *x.shape[1:])
    outputs = jax.vmap(function, in_axes=(1, None), out_axes=1)(by_prompt, shared)
    return outputs.reshape(x.shape[0], *outputs.shape[2:])


def _scaled_logits(query: jax.Array, key: jax.Array, scale: float) -> jax.Array:
    """Return scale·q·k as float32 `[batch, kv_heads, group, queries, keys]`."""
    batch, heads, queries, head_dim = query.shape
    kv_heads = key.shape[1]
    # Scaling the queries is cheaper than scaling the logits, but would round low precision again.
    scale_queries = query.dtype == jnp.float32
    if scale_queries:
        query = query * scale
    grouped = query.reshape(batch, kv_heads, heads // kv_heads, queries, head_dim)
    logits = jnp.einsum("bngqd,bnkd->bngqk", grouped, key, preferred_element_type=jnp.float32)
    return logits if scale_queries else logits * scale


def _group_heads(bias: jax.Array, *, kv_heads: int) -> jax.Array:
    """Reshape `[batch, heads, …]` to float32 `[batch, kv_heads, group, queries, keys]`."""
    batch, heads, *rest = bias.shape
    groups = (1, 1) if heads == 1 else (kv_heads, heads // kv_heads)
    return bias.astype(jnp.float32).reshape(batch, *groups, *rest)


def _masked_softmax(logits: jax.Array, options: AttentionOptions) -> jax.Array:
    mask, sinks = options.mask, options.sinks
    allowed = None if mask is None else mask.dense()[:, :, None]  # [batch, 1, 1, queries, keys]
    if allowed is not None:
        logits = jnp.where(allowed, logits, MASKED_LOGIT)
    if sinks is None:
        probabilities = jax.nn.softmax(logits, axis=-1)
    else:
        _, kv_heads, group, *_ = logits.shape
        sink = sinks.astype(jnp.float32).reshape(1, kv_heads, group, 1, 1)
        sink = jnp.broadcast_to(sink, (*logits.shape[:-1], 1))
        with_sink = jnp.concatenate([logits, sink], axis=-1)
        probabilities = jax.nn.softmax(with_sink, axis=-1)[..., :-1]
    if options.zero_fully_masked_rows and allowed is not None:
        probabilities = jnp.where(allowed.any(axis=-1, keepdims=True), probabilities, 0.0)
    return probabilities


_NUM_BLOCKS = 4
# With shorter blocks, a step saves less than the compilation of the blocks costs.
_SMALLEST_BLOCK = 64


def uses_causal_blocks(call: AttentionCall, sharding: BoundSharding | None) -> bool:
    """Return whether `attend_by_causal_blocks` is faster than `xla_attention`, and equal to it.

    Dropout draws its random numbers for all pairs at once, and a prefix makes later keys visible.

    Args:
      call: The attention.
      sharding: Sharding of the model; None or without a mesh for JAX's devices.
    """
    block, rest = divmod(call.num_queries, _NUM_BLOCKS)
    fits = rest == 0 and block >= _SMALLEST_BLOCK
    hides_later_keys = call.is_causal and call.is_self_attention and not call.has_prefix
    is_on_cpu = call.platform == "cpu" and is_single_cpu(sharding)
    return fits and hides_later_keys and not call.has_dropout and is_on_cpu


def attend_by_causal_blocks(
    query: jax.Array, key: jax.Array, value: jax.Array, options: AttentionOptions
) -> jax.Array:
    """Compute causal attention of whole rows, queries and keys `[batch, length, heads, head_dim]`.

    See `xla_attention` for all arguments and the result.
    """
    size = query.shape[1] // _NUM_BLOCKS
    mask, bias = options.mask, options.dense_bias
    assert mask is not None

    def attend(end: int) -> jax.Array:
        queries, keys = slice(end - size, end), slice(end)
        part = dataclasses.replace(
            options,
            mask=mask.part(queries, keys),
            bias=None if bias is None else bias[:, :, queries, keys],
        )
        return xla_attention(query[:, queries], key[:, keys], value[:, keys], part)

    # Model FLOPs count half of all pairs of queries and keys, which is this share of the computed.
    with jax.named_scope(f"rows_{_NUM_BLOCKS}_of_{_NUM_BLOCKS + 1}"):
        return jnp.concatenate([attend(size * (i + 1)) for i in range(_NUM_BLOCKS)], axis=1)
