"""The decoding loop: prompts in, continuations out, one cached step at a time.

The prompts fill the cache in one go. After that each step feeds one token: the prompt's own as long
as there is one (prompts are left-aligned and may differ in length), a drawn one from there on. What
the first pass wrote beyond a row's own prompt is overwritten before any query can see it. The loop
ends early when every row has ended.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from layerkit.config import Configurable
from layerkit.decoding.samplers import sample_token
from layerkit.nested_map import NestedMap

ExtendFn = Callable[[Any, jax.Array, jax.Array], tuple[Any, jax.Array]]


class SampleDecoder(Configurable):
    """How a continuation is drawn.

    Attributes:
      max_decode_steps: Columns beyond the widest prompt.
      temperature: 0 is greedy; 1 draws from the model's own distribution.
      eos_id: A row ends when this token is drawn (it is kept); None never ends early.
    """

    max_decode_steps: int = 64
    temperature: float = 1.0
    eos_id: int | None = None

    def __post_init__(self) -> None:
        if self.max_decode_steps < 1:
            raise ValueError(f"max_decode_steps={self.max_decode_steps} must be at least 1")
        if self.temperature < 0:
            raise ValueError(f"temperature={self.temperature} must not be negative (0 is greedy)")

    # A field of a model, so that it takes part in the model's equality and hash.
    def __eq__(self, other: object) -> bool:
        return isinstance(other, SampleDecoder) and self._values() == other._values()

    def __hash__(self) -> int:
        return hash(self._values())

    def _values(self) -> tuple[Any, ...]:
        # All of them, so that a subclass with fields of its own needs to write nothing here.
        return (type(self), *(getattr(self, field.name) for field in dataclasses.fields(self)))


class _State(struct.PyTreeNode):
    step: jax.Array  # column whose token comes next
    ids: jax.Array  # [batch, max_length]
    log_probs: jax.Array  # [batch, max_length]
    lengths: jax.Array  # [batch]
    ended: jax.Array  # [batch]
    logits: jax.Array  # [batch, vocab], for column `step`
    cache: Any


def extend_prompts(
    decoder: SampleDecoder,
    extend: ExtendFn,
    cache: Any,
    *,
    prompts: jax.Array,
    prompt_lengths: jax.Array,
    key: jax.Array | None,
) -> NestedMap:
    """Continues prompts by a cached model.

    Args:
      decoder: How tokens are drawn.
      extend: `(cache, ids [batch, t], time_step) -> (cache, logits [batch, t, vocab])`.
      cache: An empty cache for prompt width + `max_decode_steps` tokens.
      prompts: int32 `[batch, width]`, left-aligned; what stands after a row's length is not read.
      prompt_lengths: int32 `[batch]`; one beyond `width` counts as `width`. A row of length 0 only
        fills up the batch: nothing is drawn for it, and no other row waits for it.
      key: Random key; column t uses fold_in(key, t). None if the decoder is greedy.

    Returns:
      A NestedMap:
        ids: int32 `[batch, width + max_decode_steps]`: prompt, what was drawn, zeros.
        lengths: int32 `[batch]`, of prompt and continuation.
        log_probs: float32 like `ids`, of the drawn tokens under the model itself, whatever the
          temperature; 0 elsewhere.
    """
    batch, width = prompts.shape
    max_length = width + decoder.max_decode_steps
    prompt_lengths = jnp.minimum(prompt_lengths, width)
    # The model runs on the padding too, and an id that it does not have would leave NaN in the
    # cache, which no mask hides: 0 · NaN is NaN.
    prompts = jnp.where(jnp.arange(width) < prompt_lengths[:, None], prompts, 0)
    ids = jnp.zeros((batch, max_length), jnp.int32).at[:, :width].set(prompts)
    # The logits of this pass are not used, so the compiler leaves their computation out.
    cache, _ = extend(cache, prompts, jnp.int32(0))
    is_filler = prompt_lengths == 0
    start = jnp.min(jnp.where(is_filler, width, prompt_lengths))
    last = jnp.take(prompts, start - 1, axis=1)
    cache, logits = extend(cache, last[:, None], start - 1)
    state = _State(
        step=start,
        ids=ids,
        log_probs=jnp.zeros((batch, max_length), jnp.float32),
        lengths=prompt_lengths,
        ended=is_filler,
        logits=logits[:, -1],
        cache=cache,
    )

    def advance(state: _State) -> _State:
        in_prompt = state.step < prompt_lengths
        step_key = None if key is None else jax.random.fold_in(key, state.step)
        drawn = sample_token(state.logits, step_key, temperature=decoder.temperature)
        log_prob = jnp.take_along_axis(
            jax.nn.log_softmax(state.logits), drawn[:, None], axis=-1
        ).squeeze(-1)
        counts = ~in_prompt & ~state.ended
        token = jnp.where(counts, drawn, jnp.where(in_prompt, state.ids[:, state.step], 0))
        ended = state.ended
        if decoder.eos_id is not None:
            ended = ended | (counts & (drawn == decoder.eos_id))
        cache, logits = extend(state.cache, token[:, None], state.step)
        return _State(
            step=state.step + 1,
            ids=state.ids.at[:, state.step].set(token),
            log_probs=state.log_probs.at[:, state.step].set(jnp.where(counts, log_prob, 0.0)),
            lengths=state.lengths + counts,
            ended=ended,
            logits=logits[:, -1],
            cache=cache,
        )

    def unfinished(state: _State) -> jax.Array:
        return (state.step < max_length) & ~jnp.all(state.ended)

    final = jax.lax.while_loop(unfinished, advance, state)
    columns = jnp.arange(max_length)[None, :]
    return NestedMap(
        ids=jnp.where(columns < final.lengths[:, None], final.ids, 0),
        lengths=final.lengths,
        log_probs=final.log_probs,
    )
