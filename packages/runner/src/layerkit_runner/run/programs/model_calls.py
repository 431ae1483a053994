"""Calls of a model on rows of token ids, as pure functions that can be compiled or exported."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from layerkit import decoding
from layerkit.base.base_layer import RANDOM
from layerkit.base.base_model import BaseModel
from layerkit.config import Config, assigned_fields, is_config, target_of
from layerkit.config.nested_map import NestedMap
from layerkit.decoding import SampleDecoder, SampledRows, SpeculativeDecoder, cached_step
from layerkit.layers import TrainablePositionalEmbedding
from layerkit.layers.transformer.transformer import drop_none
from layerkit.models import LanguageModel, SequenceModel
from layerkit_runner.config.config_tree import walk
from layerkit_runner.errors import UsageError

Variables = dict[str, Any]


def has_source(model: BaseModel) -> bool:
    """Return whether a model reads source sequences, as an encoder-decoder does."""
    return isinstance(model, SequenceModel)


def network_of(model: BaseModel) -> str:
    """Return the name of the child that computes logits of tokens."""
    for name in ("lm", "model"):
        if hasattr(model, f"{name}_tpl"):
            return name
    raise UsageError(
        "the model has no logits of tokens",
        field="model",
        value=type(model).__qualname__,
        expected="a language model or an encoder-decoder, such as LanguageModel or SequenceModel",
    )


def max_positions(config: Config) -> int | None:
    """Return the number of positions of a row that a model's config has; None for any number."""
    sizes = [
        assigned_fields(value).get("max_length")
        for _, value in walk(config, "model")
        if is_config(value) and target_of(value) is TrainablePositionalEmbedding
    ]
    known = [size for size in sizes if size]
    return min(known) if known else None


def token_logits(model: BaseModel, variables: Variables, batch: NestedMap) -> jax.Array:
    """Compute the logits float32 `[rows, length, vocab]` of the token after each position.

    Args:
      model: Language model.
      variables: Variables of the model.
      batch: `ids` int32 `[rows, length]` and `lengths` int32 `[rows]`; an encoder-decoder also
        reads `source` and `source_lengths`.
    """
    name = network_of(model)
    segments = _segments(batch.ids, batch.lengths)

    def call(bound: Any) -> jax.Array:
        network = getattr(bound, name)
        if not has_source(model):
            return network.logits(batch.ids, segment_ids=segments)
        return network.logits(
            batch.source,
            batch.ids,
            source_segment_ids=_segments(batch.source, batch.source_lengths),
            target_segment_ids=segments,
        )

    bound: Any = model.clone(train=False)
    return bound.apply(variables, method=call)


def token_log_probs(
    model: BaseModel, variables: Variables, batch: NestedMap
) -> tuple[jax.Array, jax.Array]:
    """Compute log p(label) and whether the label is the most likely token, for an evaluated batch.

    Returns:
      float32 `[rows, length]` in nats, and bool `[rows, length]`.
    """
    predicts = isinstance(model, (LanguageModel, SequenceModel))

    def call(bound: Any) -> tuple[jax.Array, jax.Array]:
        if predicts:
            predictions = bound.compute_predictions(batch)
        else:
            predictions = bound.lm(
                batch.ids,
                labels=batch.labels,
                weights=batch.weights,
                segment_ids=batch.segment_ids,
                segment_pos=batch.segment_pos,
                **drop_none(images=batch.get("images")),
            )
        return -predictions.per_token_xent, predictions.correct

    bound: Any = model.clone(train=False)
    return bound.apply(variables, method=call)


def start_rows(
    model: BaseModel,
    decoder: SampleDecoder,
    variables: Variables,
    batch: NestedMap,
    seed: jax.Array,
) -> SampledRows:
    """Run the model on the prompts of a batch; see `LanguageModel.start_decoding`."""
    bound: Any = model.clone(train=False, decoder=decoder)
    rngs = {RANDOM: jax.random.key(seed)} if decoder.needs_key else {}
    return bound.apply(variables, batch, rngs=rngs, method="start_decoding")


def advance_rows(
    model: BaseModel,
    decoder: SampleDecoder,
    variables: Variables,
    rows: SampledRows,
    until: jax.Array,
) -> SampledRows:
    """Choose the tokens of columns before `until`; see `layerkit.decoding.advance_rows`."""
    name = network_of(model)

    def call(bound: Any) -> SampledRows:
        extend = cached_step(getattr(bound, name), rows)
        return decoding.advance_rows(decoder, extend, rows, until=until)

    bound: Any = model.clone(train=False)
    return bound.apply(variables, method=call)


def decoder_for(model: Any, *, max_new_tokens: int, is_greedy: bool, eos_id: Any) -> SampleDecoder:
    """Return a decoder of rows with the drafts, stop sequences and processors of the model's."""
    default = model.decoder
    names = [field.name for field in dataclasses.fields(SampleDecoder)]
    fields = {name: getattr(default, name) for name in names if hasattr(default, name)}
    fields["min_decode_steps"] = min(default.min_decode_steps, max_new_tokens)
    # Longer ones cannot occur.
    stops = [stop for stop in fields.get("stop_sequences") or () if len(stop) <= max_new_tokens]
    fields |= {
        "stop_sequences": tuple(stops),
        "max_decode_steps": max_new_tokens,
        "max_length": None,  # The batch has the limits of its rows.
        "temperature": 0.0 if is_greedy else 1.0,
        "top_k": None,
        "top_p": None,
        "num_samples": 1,
        "lazy_prefix_broadcast": False,
        "eos_id": eos_id,
    }
    drafts = is_greedy and default.drafts
    return (SpeculativeDecoder if drafts else SampleDecoder)(**fields)


def _segments(ids: jax.Array, lengths: jax.Array) -> jax.Array:
    return (jnp.arange(ids.shape[1]) < lengths[:, None]).astype(jnp.int32)
