"""Decoding with a network that keeps a cache, for the models that contain one.

Before the loop over the tokens, `step_weights` splits the weights into one array per layer and
casts them to the compute dtype, since XLA does not move work out of the loop. For each token and
layer it would copy weights and cache out of the stack, and the cache back, and cast the weights.
For few rows this takes longer than the products: on an H100, 12 layers of 1024 dims in bfloat16
with float32 weights take 1.10 ms for four tokens, and 0.48 ms with weights that are split and cast
before the loop.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from layerkit.base.base_layer import CACHE, PARAMS, PROMPT_CACHE, BaseLayer, visit_layers
from layerkit.base.sharding import BoundSharding, is_single_cpu, model_device
from layerkit.base.weights import shared_ids
from layerkit.config import Config, is_config, target_of
from layerkit.config.checks import require
from layerkit.config.nested_map import NestedMap
from layerkit.decoding.cache_rows import CacheRows, round_up, row_axes, row_parts
from layerkit.decoding.decoder import ExtendFn, Prompts
from layerkit.decoding.logit_processors import RowOptions
from layerkit.decoding.loop import SampledRows, extend_prompts, start_prompts
from layerkit.layers.attention.cached_states import set_num_prompt
from layerkit.layers.basic.positions import set_longest_sequence, switching_length
from layerkit.layers.transformer.repeat import is_unrolled_by_default
from layerkit.layers.transformer.stacks import StackedTransformerRepeated, unrolled_stack
from layerkit.layers.transformer.transformer import drop_none


class CachedPrompts(NamedTuple):
    """The prompts of a batch, and the network with an empty cache for them.

    The fields are the arguments of `extend_prompts`.
    """

    decoder: Any
    extend: ExtendFn
    cache: Any
    prompts: Prompts
    cache_axes: Any
    row_parts: int

    def decode(self) -> NestedMap:
        """Return the outputs of `extend_prompts`.

        Raises:
          ConfigError: The decoder draws but has no random key, or the network has fewer positions
            than tokens.
        """
        return extend_prompts(**self._asdict())

    def start(self) -> SampledRows:
        """Return the rows before their first token, which `advance_rows` continues."""
        return start_prompts(*self[:4], row_parts=self.row_parts)


def cache_prompts(
    model: Any,
    network: BaseLayer,
    batch: NestedMap,
    *,
    init_cache: Callable[[Any, Any, int], None],
    inputs: Any,
    prompts: tuple[jax.Array, jax.Array],
    prefix_lengths: jax.Array | None = None,
) -> CachedPrompts:
    """Return the prompts of a batch with the decoder of a model and a cache of its network.

    Args:
      model: Model with a field `decoder`.
      network: Child of the model with a method `extend_step(ids, time_step=…)`.
      batch: Batch with optional entries `max_steps`, `temperature`, `top_k`, `top_p` and `row_ids`
        `[batch]`; see `Prompts` and `RowOptions`.
      init_cache: Function `(network, inputs, max_length)` that creates empty caches of rows.
      inputs: Argument of `init_cache`, a tree of arrays `[batch, …]`.
      prompts: Left-aligned token ids int32 `[batch, width]` and their lengths int32 `[batch]`.
      prefix_lengths: Number of leading tokens of each prompt with bidirectional attention, int32
        `[batch]`; None for a causal network.
    """
    ids, lengths = prompts[0], jnp.minimum(prompts[1], prompts[0].shape[1])
    bare, variables = step_weights(network)
    decoder, parts = model.decoder, row_parts(model)
    max_length = round_up(decoder.row_length(ids.shape[1]), parts)

    extend, switches = _step(bare, variables, max_length, lengths)

    # Decoders repeat and reorder the rows of the cache, and in the same way the prefix lengths and
    # the tokens.
    def make_cache(row_inputs: Any) -> Any:
        inputs, prefix_lengths = row_inputs
        _, state = bare.apply(variables, inputs, max_length, method=init_cache, mutable=[CACHE])
        rows = CacheRows(state[CACHE], {}, prefix_lengths)
        if not switches:
            return rows
        # Not `len`: an export leaves the number of rows open.
        num_rows = jax.tree.leaves(inputs)[0].shape[0]
        return rows, jnp.zeros((num_rows, max_length), jnp.int32)

    # The loop runs the last token of the shortest prompt again, and all tokens after it.
    repeats = jnp.min(jnp.where(lengths == 0, max_length, lengths)) - 1
    cache, has_state = set_num_prompt(make_cache((inputs, prefix_lengths)), repeats)
    can_draft = hasattr(bare, "draft_step") and not switches and not has_state
    expected = "one without drafts, unless the network is a TransformerLm without LongRoPE"
    expected += " or layers with a state, which cannot drop a rejected token"
    name = type(decoder).__name__
    require(can_draft or not decoder.drafts, model, "decoder", name, expected)
    expected = "no LongRoPE in a network that has layers with a state, which cannot go back"
    require(not (switches and has_state), model, "scaling", "LongRopeScaling", expected)
    cache_axes = row_axes(make_cache, (inputs, prefix_lengths))
    if decoder.lazy_prefix_broadcast:
        from layerkit.decoding.lazy_prefix_broadcast import share_prompts

        expected = "no LongRoPE with lazy_prefix_broadcast=True, since it changes cached keys"
        require(not switches, model, "scaling", "LongRopeScaling", expected)
        num_slots = round_up(min(decoder.max_decode_steps, max_length), parts)
        extend, cache_axes = share_prompts(
            bare, extend, cache_axes, first_step=repeats, num_slots=num_slots
        )
    return CachedPrompts(
        decoder,
        extend,
        cache=cache,
        prompts=Prompts(
            ids,
            lengths,
            key=model.next_prng_key() if decoder.needs_key else None,
            row_ids=batch.get("row_ids"),
            max_steps=batch.get("max_steps"),
            options=RowOptions(*(batch.get(name) for name in RowOptions._fields)),
        ),
        cache_axes=cache_axes,
        row_parts=parts,
    )


def cached_step(network: BaseLayer, rows: SampledRows) -> ExtendFn:
    """Return the function that runs a network on the next tokens of rows.

    Args:
      network: Bound network with a method `extend_step(ids, time_step=…)`.
      rows: The rows, whose cache `CachedPrompts.start` filled.
    """
    max_length = round_up(rows.ids.shape[1], row_parts(network))
    return _step(*step_weights(network), max_length, rows.prompt_lengths)[0]


def _step(
    bare: BaseLayer, variables: Any, max_length: int, prompt_lengths: jax.Array
) -> tuple[ExtendFn, bool]:
    """Return the function of steps of rows of `max_length`, and whether they need their tokens."""
    trained = switching_length(_templates(bare))
    if trained is None or trained >= max_length:
        return _extend_fn(bare, variables), False
    return _switching_extend_fn(bare, variables, trained, jnp.max(prompt_lengths)), True


def _templates(bare: BaseLayer) -> dict[str, Config]:
    """Return the configs in the fields of a network."""
    names = [field.name for field in dataclasses.fields(bare)]
    values: dict[str, Any] = {name: getattr(bare, name, None) for name in names}
    return {name: value for name, value in values.items() if is_config(value)}


def _switching_extend_fn(
    bare: BaseLayer, variables: Any, trained: int, longest: jax.Array
) -> ExtendFn:
    """Return the function of steps of a network that rotates long rows otherwise (LongRoPE).

    As in Transformers, a step that makes rows longer than the trained context computes their whole
    cache anew, and a prompt that is longer makes all rows of the batch long.

    Args:
      bare: Network without its variables.
      variables: Variables of the network.
      trained: Length of the trained context.
      longest: Length of the longest prompt, int32 scalar.
    """

    def fixed(length: int) -> ExtendFn:
        templates = {
            name: set_longest_sequence(config, length)
            for name, config in _templates(bare).items()
            if switching_length(config) is not None
        }
        return _extend_fn(bare.clone(**templates), variables)

    short, long = fixed(trained), fixed(trained + 1)
    is_long = longest > trained

    def extend(rows: Any, ids: jax.Array, time_step: jax.Array) -> tuple[Any, jax.Array]:
        rows, tokens = rows
        tokens = jax.lax.dynamic_update_slice(tokens, ids.astype(tokens.dtype), (0, time_step))
        if ids.shape[1] > 1:  # the prompts
            rows, logits = jax.lax.cond(is_long, long, short, rows, ids, time_step)
            return (rows, tokens), logits

        def anew(rows: Any, ids: jax.Array, time_step: jax.Array) -> tuple[Any, jax.Array]:
            del ids, time_step
            rows, logits = long(rows, tokens[:, : trained + 1], jnp.int32(0))
            return rows, logits[:, -1:]

        outgrows = jnp.where(time_step == trained, 2, jnp.int32(time_step > trained))
        kind = jnp.where(is_long, 1, outgrows)
        rows, logits = jax.lax.switch(kind, (short, long, anew), rows, ids, time_step)
        return (rows, tokens), logits

    return extend


def _extend_fn(bare: BaseLayer, variables: Any) -> ExtendFn:
    """Return the function of steps of a network without its variables, and these.

    The cache of the function is a `CacheRows`.
    """

    # Functions of variables can be called in a loop, unlike bound modules.
    def extend(
        rows: CacheRows, ids: jax.Array, time_step: jax.Array, method: str = "extend_step"
    ) -> tuple[CacheRows, jax.Array]:
        prefix = drop_none(prefix_lengths=rows.prefix_lengths) if method == "extend_step" else {}
        logits, state = bare.apply(
            {**variables, CACHE: rows.cache, PROMPT_CACHE: rows.prompts},
            ids,
            time_step=time_step,
            method=method,
            mutable=[CACHE],
            **prefix,
        )
        return rows._replace(cache=state[CACHE]), logits

    return extend


def step_weights(network: BaseLayer) -> tuple[BaseLayer, Any]:
    """Return (unbound network, its variables), arranged so that decoding steps run fastest.

    Weights are cast to the dtype in which their layers compute if that is smaller, and the stack of
    layers is unrolled. The results of steps are the same.

    On accelerators, the cast or the unrolling is skipped if its weights exceed a quarter of the
    memory of a device, or with several processes. On CPUs, both are skipped with several devices,
    and the unrolling for more layers than `Repeat` unrolls by default. A stack with a value in its
    field `unroll`, or with layers that share weights (`shared_weight_id`), is not unrolled.

    Call this outside of the loop over the tokens, so that each weight is copied once.

    Args:
      network: Bound network with a child `stack` of the field `stack_tpl`, or `decoder` of the
        field `decoder_stack_tpl`.
    """
    sharding = network.inherited("sharding")
    bare, variables = _unrolled(network, sharding)
    dtypes = _compute_dtypes(bare)

    def cast(path: tuple[Any, ...], x: jax.Array) -> jax.Array:
        dtype = dtypes.get(tuple(entry.key for entry in path), x.dtype)
        is_smaller = jnp.issubdtype(x.dtype, jnp.floating) and dtype.itemsize < x.dtype.itemsize
        return x.astype(dtype) if is_smaller else x

    params = variables.get(PARAMS, {})
    smaller = jax.eval_shape(lambda tree: jax.tree.map_with_path(cast, tree), params)
    if _copies_fit(smaller, sharding):
        variables = {**variables, PARAMS: jax.tree.map_with_path(cast, params)}
    return bare, variables


def _unrolled(network: BaseLayer, sharding: BoundSharding | None) -> tuple[BaseLayer, Any]:
    bare, variables = network.unbind()
    for field, child in (("stack_tpl", "stack"), ("decoder_stack_tpl", "decoder")):
        template: Any = getattr(bare, field, None)
        if not (is_config(template) and target_of(template) is StackedTransformerRepeated):
            continue
        # An id of shared weights in a repeated layer holds in each repetition on its own.
        if shared_ids(template) or template.unroll is not None:
            continue
        stack = getattr(network, child)
        if model_device(sharding).platform == "cpu":
            is_faster = is_unrolled_by_default(sharding, stack.num_layers, is_training=False)
        else:
            is_faster = _copies_fit(variables.get(PARAMS, {}).get(child), sharding)
        if not is_faster:
            continue
        bare = bare.clone(**{field: unrolled_stack(template)})
        num_first = len(template.first_tpls or ())
        places = [stack.locate_layer(layer) for layer in range(num_first, stack.num_layers)]
        variables = {
            collection: _split(tree, child, places) for collection, tree in variables.items()
        }
    return bare, variables


def _split(tree: Any, child: str, places: list[tuple[tuple[str, ...], tuple[int, ...]]]) -> Any:
    """Replace the stacked variables of a stack by a dict for each layer, `layers_<index>`.

    Args:
      tree: Variables of one collection, nested dicts by layer path.
      child: Name of the stack.
      places: Path within the stack, and indices on the stacked axes, of each repeated layer.
    """
    if child not in tree:
        return tree
    of_layers = {path[0] for path, _ in places}
    split = {name: value for name, value in tree[child].items() if name not in of_layers}
    for layer, (path, indices) in enumerate(places):
        subtree = tree[child]
        for name in path:
            subtree = subtree.get(name, {})
        split[f"layers_{layer}"] = jax.tree.map(lambda x, at=indices: x[at], subtree)
    return {**tree, child: split}


def _compute_dtypes(network: BaseLayer) -> dict[tuple[str, ...], jnp.dtype]:
    """Return the dtype to which each weight is cast when its layer reads it, by path."""
    layers: list[BaseLayer] = []
    visit_layers(network, layers.append)
    return {
        (*layer.path, name): layer.compute_dtype
        for layer in layers
        for name in layer._records("weights")
    }


def _copies_fit(weights: Any, sharding: BoundSharding | None) -> bool:
    """Return whether weights take at most a quarter of the memory of the device."""
    device = model_device(sharding)
    if device.platform == "cpu":
        return is_single_cpu(sharding)
    # All processes must decide alike.
    if jax.process_count() > 1 or device not in jax.local_devices():
        return False
    memory: int = (device.memory_stats() or {}).get("bytes_limit", 0)
    return 4 * sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(weights)) <= memory
