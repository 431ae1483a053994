"""Calls of a model on rows of token ids, as pure functions that can be compiled or exported."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from layerkit.base_layer import RANDOM
from layerkit.base_model import BaseModel
from layerkit.decoding import SampleDecoder
from layerkit.models import LanguageModel, SequenceModel
from layerkit.nested_map import NestedMap
from layerkit_runner.errors import UsageError

Variables = dict[str, Any]


def has_source(model: BaseModel) -> bool:
    """Return whether a model reads source sequences, as an encoder-decoder does."""
    return isinstance(model, SequenceModel)


def network_of(model: BaseModel) -> str:
    """Return the name of the child that computes logits of tokens.

    Raises:
      UsageError: The model has none.
    """
    for name in ("lm", "model"):
        if hasattr(model, f"{name}_tpl"):
            return name
    raise UsageError(
        "the model has no logits of tokens",
        field="model",
        value=type(model).__qualname__,
        expected="a language model or an encoder-decoder, such as LanguageModel or SequenceModel",
    )


def token_logits(model: BaseModel, variables: Variables, batch: NestedMap) -> jax.Array:
    """Compute the logits float32 `[rows, length, vocab]` of the token after each position.

    Args:
      model: Language model, or encoder-decoder.
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


def token_log_probs(model: BaseModel, variables: Variables, batch: NestedMap) -> jax.Array:
    """Compute log p(label) in nats, float32 `[rows, length]`, for a batch of the model.

    Args:
      model: Language model, or encoder-decoder.
      variables: Variables of the model.
      batch: Batch with `labels`, as an evaluation reads it; see `LanguageModel`.
    """
    own = isinstance(model, (LanguageModel, SequenceModel))

    def call(bound: Any) -> jax.Array:
        if own:
            predictions = bound.compute_predictions(batch)
        else:
            predictions = bound.lm(
                batch.ids,
                labels=batch.labels,
                weights=batch.weights,
                segment_ids=batch.segment_ids,
                segment_pos=batch.segment_pos,
            )
        return -predictions.per_token_xent

    bound: Any = model.clone(train=False)
    return bound.apply(variables, method=call)


def continue_rows(
    model: BaseModel,
    decoder: SampleDecoder,
    variables: Variables,
    batch: NestedMap,
    seed: jax.Array,
) -> NestedMap:
    """Continue the prompts of a batch; see `LanguageModel.decode`.

    Args:
      model: Model that decodes.
      decoder: Decoder in place of that of the model.
      variables: Variables of the model.
      batch: Batch of prompts, or of sources.
      seed: Seed of the random numbers, an int32 scalar.
    """
    bound: Any = model.clone(train=False, decoder=decoder)
    rngs = {RANDOM: jax.random.key(seed)} if decoder.needs_key else {}
    return bound.apply(variables, batch, rngs=rngs, method="decode")


def decoder_for(model: Any, *, max_new_tokens: int, is_greedy: bool, eos_id: Any) -> SampleDecoder:
    """Return a decoder with the stop sequences and processors of a model's own decoder.

    Sampling options are those of rows; see `RowOptions`.

    Args:
      model: Model with a field `decoder`.
      max_new_tokens: Largest number of new tokens.
      is_greedy: True to choose the most likely tokens.
      eos_id: End token, or several; None for no end token.
    """
    own = model.decoder
    fields: dict[str, Any] = {}
    if isinstance(own, SampleDecoder):
        fields = {field.name: getattr(own, field.name) for field in dataclasses.fields(own)}
        fields["min_decode_steps"] = min(own.min_decode_steps, max_new_tokens)
    fields |= {
        "max_decode_steps": max_new_tokens,
        "temperature": 0.0 if is_greedy else 1.0,
        "top_k": None,
        "top_p": None,
        "num_samples": 1,
        "eos_id": eos_id,
    }
    return SampleDecoder(**fields)


def _segments(ids: jax.Array, lengths: jax.Array) -> jax.Array:
    """Return 1 for tokens and 0 for padding, int32 `[rows, length]`."""
    return (jnp.arange(ids.shape[1]) < lengths[:, None]).astype(jnp.int32)
