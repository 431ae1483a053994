"""A model with weights and a tokenizer, to generate, to score texts and to compute logits."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import jax
import numpy as np

from layerkit.base.base_layer import PARAMS
from layerkit.config import Config
from layerkit.config.config import ShownAsTree
from layerkit.config.nested_map import NestedMap
from layerkit.models import AttentionDecoderModel
from layerkit_inputs.base.tokenizer_interface import Tokenizer, end_disagreement, end_ids
from layerkit_inputs.chat.conversations import Conversation
from layerkit_inputs.chat.template import ChatTemplate, load_chat_template
from layerkit_inputs.chat.token_masks import encode_prompt, turn_ends
from layerkit_inputs.packing.model_features import as_tokens
from layerkit_runner.errors import UsageError
from layerkit_runner.observers import Observers
from layerkit_runner.run.job import Job
from layerkit_runner.run.job_errors import job_errors
from layerkit_runner.run.model.generation import (
    Buckets,
    GenerateOptions,
    Ids,
    NoTokenizerError,
    check_vocabulary,
    cut_new_ids,
    fetch_array,
    find_tokenizer,
    prompt_batch,
    prompt_ids,
    text_list,
    token_array,
    token_rows,
)
from layerkit_runner.run.model.scoring import Score, source_rows, text_rows
from layerkit_runner.run.programs import model_calls
from layerkit_runner.run.programs.build_programs import eval_programs
from layerkit_runner.run.programs.decode_program import TextStream
from layerkit_runner.step.train_state import TrainState

Method = TypeVar("Method", bound=Callable[..., Any])

# Columns of a call without a stream. Ctrl-C is noticed between calls.
_COLUMNS_AT_A_TIME = 64
# The same if a caller decides whether enough tokens are there.
_COLUMNS_BETWEEN_STOPS = 8


def _raising_job_errors(method: Method) -> Method:
    """Return a method of `LoadedModel` that raises errors of layers and memory as `UsageError`."""

    @functools.wraps(method)
    def call(self: LoadedModel, *args: Any, **options: Any) -> Any:
        with job_errors(method.__name__.strip("_"), self.job.resolved):
            return method(self, *args, **options)

    return cast(Method, call)


def _check_one_each(prompts: Sequence[Any], texts: Sequence[Any]) -> None:
    if len(prompts) != len(texts):
        expected = f"one for each of {len(texts)} texts"
        raise UsageError(field="prompts", value=len(prompts), expected=expected)


class LoadedModel(ShownAsTree):
    """A model with weights on the devices; `layerkit_runner.load` returns it.

    Compiled functions are kept by the shape of their inputs, which is rounded up, so that calls of
    similar sizes share them.

    Attributes:
      path: Folder from which the weights were read.
      step: Training step of the weights.
      job: Task, partitioner and experiment.
      state: Weights. A program beside training replaces them for each run.
    """

    def __init__(self, job: Job, state: TrainState, *, path: str, step: int) -> None:
        """Store the parts; see the class."""
        self.job = job
        self.path = path
        self.step = step
        self.state = state
        self._compiled: dict[Any, Any] = {}
        longest = model_calls.max_positions(job.resolved.task.model)
        self._buckets = Buckets(job.partitioner.num_batch_shards(), longest)

    @property
    def model(self) -> Any:
        """The model, a Flax module: `model.model.apply(model.variables, …)`."""
        return self.job.task.model

    @property
    def config(self) -> Config:
        """Config of the model."""
        return self.job.resolved.task.model

    @functools.cached_property
    def variables(self) -> Mapping[str, Any]:
        """Variables of the model by collection, as decoding uses them, which may be averages."""
        state = self.job.partitioner.stored_state(self.job.task, self.state)
        return self.job.task.decoded_variables(state)

    @property
    def weights(self) -> Any:
        """Trained and frozen weights, nested dicts by layer path."""
        return self.variables[PARAMS]

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of the data set or of the Hugging Face folder.

        Raises:
          UserError: There is none, or its file is missing.
        """
        return self._tokenizer(None)

    def generate(
        self,
        prompts: str | Sequence[str],
        *,
        max_new_tokens: int | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
        stream: Callable[[int, str], object] | None = None,
    ) -> list[str]:
        """Continue texts, each up to an end token or `max_new_tokens`.

        A prompt begins with the tokenizer's `start_id` where texts do in training, unless the text
        begins with it. An encoder-decoder returns the target of each text. Other models
        return the text that follows the prompt when all tokens are decoded together.

        Args:
          prompts: A text, or several of any lengths.
          max_new_tokens: Largest number of new tokens; None for that of the model's decoder.
          temperature: Divisor of the logits, 0 for the most likely tokens; None for that of the
            model's decoder, or 0 if that is not a `SampleDecoder`.
          top_k: Number of most likely tokens to sample from, 0 for all; None as for `temperature`.
          top_p: Probability of the tokens to sample from, 1 for all; None as for `temperature`.
          seed: Seed of the random numbers. The tokens of a text do not depend on other texts; if a
            text is there several times, its samples differ.
          stream: Function that is called with the index of a prompt and each new piece of its
            continuation; None for none.

        Returns:
          The continuation of each prompt, without the prompt.

        Raises:
          UserError: The model cannot decode or has no tokenizer, or an option is out of range.
        """
        texts = text_list(prompts, "prompts")
        source, _ = self._tokenizers()
        rows = [prompt_ids(text, source, is_source=self._has_source) for text in texts]
        options = GenerateOptions(max_new_tokens, temperature, top_k, top_p, seed)
        befores = [[] for _ in rows] if self._has_source else rows
        return self._generate_texts(rows, befores, options, stream)

    def chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        stream: Callable[[str], object] | None = None,
        **options: Any,
    ) -> str:
        """Answer a conversation by the chat template of the training data or of the tokenizer.

        Args:
          messages: Dicts with `role` and `content`, as in `transformers`, up to the answer.
          tools: JSON schemas of the tools that the answer may call; None for none.
          stream: Function that is called with each new piece of the answer; None for none.
          **options: Other options of `generate`, such as `max_new_tokens=100`.

        Returns:
          The answer up to where its turn ends.

        Raises:
          UserError: As for `generate`, or there is no template, or it cannot render the messages.
        """
        conversation = Conversation([*messages], None if tools is None else [*tools])
        ids = encode_prompt(conversation, self._template, self.tokenizer)
        call = None if stream is None else lambda _, piece: stream(piece)
        ends = turn_ends(self._template, self.tokenizer)
        return self._generate_texts([ids], [[]], GenerateOptions(**options), call, ends=ends)[0]

    @functools.cached_property
    def _template(self) -> ChatTemplate:
        return load_chat_template(self.job.resolved.experiment.chat_template(), self.tokenizer)

    def _generate_texts(
        self,
        rows: Sequence[Ids],
        befores: Sequence[Sequence[int]],
        options: GenerateOptions,
        stream: Callable[[int, str], object] | None,
        *,
        ends: tuple[int, ...] = (),
    ) -> list[str]:
        """Continue ids; the text of a continuation may depend on the ids before it."""
        _, target = self._tokenizers()
        streams = [TextStream(target, before) for before in befores]

        def pass_on(row: int, token_id: int) -> None:
            piece = streams[row].add(token_id)
            if stream is not None and piece:
                stream(row, piece)

        new_ids = self._generate_ids(rows, options, None if stream is None else pass_on, ends=ends)
        for row, (text_stream, ids) in enumerate(zip(streams, new_ids, strict=True)):
            text_stream.ids = ids.tolist()
            if stream is not None and (piece := text_stream.rest()):
                stream(row, piece)
        return [text_stream.text() for text_stream in streams]

    def generate_ids(
        self,
        prompts: Sequence[Ids],
        *,
        stream: Callable[[int, int], object] | None = None,
        stop: Callable[[np.ndarray], bool] | None = None,
        ends: tuple[int, ...] = (),
        **options: Any,
    ) -> list[np.ndarray]:
        """Continue token ids; see `generate`.

        Args:
          prompts: Token ids of each prompt, of any lengths of at least 1, to which nothing is
            added; those of the sources for an encoder-decoder.
          stream: Function that is called with the index of a prompt and each new token id; None for
            none.
          stop: Function of the new ids of one prompt, such as a search for a text that ends it.
            The call returns early once it is True for all prompts; None for no such end.
          ends: End tokens besides those of the model and of the tokenizer.
          **options: Other options of `generate`, such as `max_new_tokens=100`.

        Returns:
          New ids of each prompt, int32 `[tokens]`, with an end token that was chosen. Some may
          follow the place where `stop` became True.

        Raises:
          UserError: As for `generate`.
        """
        return self._generate_ids(prompts, GenerateOptions(**options), stream, stop=stop, ends=ends)

    @_raising_job_errors
    def _generate_ids(
        self,
        prompts: Sequence[Ids],
        options: GenerateOptions,
        stream: Callable[[int, int], object] | None,
        *,
        stop: Callable[[np.ndarray], bool] | None = None,
        ends: tuple[int, ...] = (),
    ) -> list[np.ndarray]:
        self._check_model(decodes=True)
        options = options.filled(self.model.decoder)
        size = self._vocab_size(of_source=self._has_source)
        prompts = token_rows(prompts, "prompts", vocab_size=size)
        if not prompts:
            return []
        batch, steps = prompt_batch(prompts, options, self._buckets, are_sources=self._has_source)
        ends = tuple(dict.fromkeys((*self._eos_id, *ends)))
        decoder = model_calls.decoder_for(
            self.model, max_new_tokens=steps, is_greedy=options.is_greedy, eos_id=ends
        )
        calls, replicated = model_calls, self.job.partitioner.replicated()
        layouts = (self.job.partitioner.batch_sharding(), replicated), (None, replicated)
        start = self._compile(calls.start_rows, decoder, shardings=layouts[0], replicates=False)
        advance = self._compile(
            calls.advance_rows, decoder, shardings=layouts[1], replicates=False, donates=(1,)
        )
        rows = start(self.state, self._put(batch), np.int32(options.seed))
        lengths = fetch_array(rows.lengths)
        columns = _COLUMNS_AT_A_TIME if stop is None else _COLUMNS_BETWEEN_STOPS
        while not np.all(fetch_array(rows.ended)):
            column = int(rows.column)
            until = column + (columns if stream is None else 1)
            rows = advance(self.state, rows, np.int32(until))
            if stream is not None:
                before, lengths = lengths, fetch_array(rows.lengths)
                ids = fetch_array(rows.ids)
                for at in range(column, int(rows.column)):  # Drafts give several columns at once.
                    for row in np.flatnonzero((before <= at) & (at < lengths)):
                        stream(int(row), int(ids[row, at]))
            if stop is not None and all(map(stop, cut_new_ids(rows, len(prompts)))):
                break
        return cut_new_ids(rows, len(prompts))

    def score(
        self, texts: str | Sequence[str], *, prompts: str | Sequence[str] | None = None
    ) -> list[Score]:
        """Compute the log-likelihood of texts, and of each of their tokens.

        Args:
          texts: A text, or several of any lengths.
          prompts: Texts before `texts`, whose tokens are not scored; the sources of an
            encoder-decoder, which needs them. None for no prompts.

        Returns:
          The score of each text, without its first token if nothing precedes that: neither a prompt
          nor the start id of the tokenizer.

        Raises:
          UserError: The model predicts no next tokens, or has no tokenizer or too few positions.
        """
        texts = text_list(texts, "texts")
        is_source, (first, second) = self._has_source, self._tokenizers()
        ids = [second.encode(text) for text in texts]
        if prompts is None and not is_source:
            prompts = [""] * len(texts)
        before = None
        if prompts is not None:
            prompts = text_list(prompts, "prompts")
            _check_one_each(prompts, texts)
            before = [
                prompt_ids(prompt, first, is_source=is_source, following=after)
                for prompt, after in zip(prompts, ids, strict=True)
            ]
        return self.score_ids(ids, prompts=before)

    @_raising_job_errors
    def score_ids(
        self,
        ids: Sequence[Ids],
        *,
        prompts: Sequence[Ids] | None = None,
        start_id: int | None = None,
    ) -> list[Score]:
        """Compute the log-likelihood of token ids; see `score`.

        Args:
          ids: Token ids of each text.
          prompts: Token ids before each text; None for no prompts.
          start_id: Id before each prompt and its text. None: nothing is added, and the first token
            of a text without a prompt is not scored.
        """
        self._check_model()
        size = self._vocab_size()
        ids = token_rows(ids, "ids", vocab_size=size)
        if prompts is not None:
            of_source = self._vocab_size(of_source=self._has_source)
            prompts = token_rows(prompts, "prompts", vocab_size=of_source)
            _check_one_each(prompts, ids)
        elif self._has_source:
            expected = "the source of each text, for this model"
            raise UsageError(field="prompts", value=None, expected=expected)
        if not ids:
            return []
        if self._has_source:
            rows = source_rows(prompts or (), ids, self._buckets, start_id=self.model.start_id)
        else:
            first = as_tokens([] if start_id is None else [start_id], where="start_id")
            check_vocabulary(first, "start_id", vocab_size=size)
            befores: Sequence[Ids] = [[]] * len(ids) if prompts is None else prompts
            before = [[*first, *prompt] for prompt in befores]
            is_prefix = getattr(self.model, "is_prefix_lm", False)
            rows = text_rows(before, ids, self._buckets, is_prefix=is_prefix)
        return rows.scores(*self._call(model_calls.token_log_probs, rows.batch))

    @_raising_job_errors
    def logits(self, ids: Any, *, source: Any = None) -> np.ndarray:
        """Compute the logits of the token after each position.

        Args:
          ids: Token ids `[rows, length]`, or `[length]` for one row; the inputs of the decoder of
            an encoder-decoder.
          source: Source ids `[rows, length]` of an encoder-decoder; None for other models.

        Returns:
          float32 `[rows, length, vocab]`, without the axis `rows` for one row.

        Raises:
          UserError: The model has no such logits, or the ids have the wrong shape.
        """
        array = token_array(ids, "ids", vocab_size=self._vocab_size())
        rows = np.atleast_2d(array)
        batch = self._pad_to_bucket(rows)
        if (source is not None) != self._has_source:
            expected = "the source ids, for this model" if self._has_source else "None"
            raise UsageError(field="source", value=source, expected=expected)
        if source is not None:
            sources = token_array(source, "source", vocab_size=self._vocab_size(of_source=True))
            if len(np.atleast_2d(sources)) != len(rows):
                expected = f"as many rows as ids, {len(rows)}"
                raise UsageError(field="source", value=list(sources.shape), expected=expected)
            other = self._pad_to_bucket(np.atleast_2d(sources))
            batch = NestedMap(**batch, source=other.ids, source_lengths=other.lengths)
        padded = self._call(model_calls.token_logits, batch)
        cut = padded[: len(rows), : array.shape[-1]]
        return cut[0] if array.ndim == 1 else cut

    @_raising_job_errors
    def evaluate(self) -> dict[str, dict[str, float]]:
        """Evaluate the held-out data sets of the experiment; return metrics by data set.

        Raises:
          UserError: There is none, or it cannot be read.
        """
        if not (programs := eval_programs(self.job)):
            owner = f"{self.job.resolved.name}.datasets()"
            raise UsageError("there is no held-out data set to evaluate", owner=owner)
        return {p.name: dict(p.run(self.state, self.step, Observers([]))) for p in programs}

    def __repr__(self) -> str:
        """Return the class of the model, its source and its number of weights."""
        count = sum(leaf.size for leaf in jax.tree.leaves(self.state.params))
        name = type(self.model).__name__
        return f"LoadedModel({name}, {count:,} weights, {self.path!r}, step={self.step})"

    def __treescope_repr__(self, *context: Any) -> Any:
        """Return the source, the config and the shapes of the weights for treescope."""
        weights = self.job.abstract_stored_state().params
        fields = {"path": self.path, "step": self.step, "config": self.config, "weights": weights}
        return self._render_tree(type(self), fields, *context)

    @property
    def _has_source(self) -> bool:
        return model_calls.has_source(self.model)

    @property
    def _network_tpl(self) -> Any:
        return getattr(self.config, f"{model_calls.network_of(self.model)}_tpl")

    def _vocab_size(self, *, of_source: bool = False) -> int | None:
        """Return the number of token ids of the model; None if it is unknown."""
        separate = getattr(self._network_tpl, "source_vocab_size", None) if of_source else None
        return separate or getattr(self._network_tpl, "vocab_size", None) or None

    def _tokenizer(self, key: str | None) -> Tokenizer:
        return find_tokenizer(self.job.resolved, self.job.partitioner, key=key)

    def _tokenizers(self) -> tuple[Tokenizer, Tokenizer]:
        """Return the tokenizers of the source and of the target, which most models share."""
        if self._has_source:
            return self._tokenizer("src"), self._tokenizer("tgt")
        return self.tokenizer, self.tokenizer

    def _check_model(self, *, decodes: bool = False) -> None:
        can_decode = self.model.can_decode and hasattr(self.model, "decoder")
        is_causal = getattr(self._network_tpl, "is_causal", True) is not False
        reads_texts = not isinstance(self.model, AttentionDecoderModel)
        if not (is_causal and reads_texts) or (decodes and not can_decode):
            expected = "a model of texts that predicts next tokens" + " and decodes" * decodes
            raise UsageError(field="model", value=type(self.model).__qualname__, expected=expected)

    @functools.cached_property
    def _eos_id(self) -> tuple[int, ...]:
        """End tokens of the model's decoder and of the tokenizer, all of which end a text."""
        known = self.model.decoder.eos_ids
        try:
            tokenizer = self._tokenizer("tgt") if self._has_source else self.tokenizer
        except NoTokenizerError:  # Ids without texts end as the decoder says.
            return known
        if (line := end_disagreement(tokenizer, known)) is not None:
            self.job.observers.message(f"end tokens   {line}")
        size = self._vocab_size() or 2**31  # The model never chooses an id beyond.
        return tuple(dict.fromkeys((*known, *(end for end in end_ids(tokenizer) if end < size))))

    def _call(self, function: Callable[..., Any], batch: NestedMap) -> Any:
        compiled = self._compile(function, shardings=(self.job.partitioner.batch_sharding(),))
        return jax.device_get(compiled(self.state, self._put(batch)))

    def _put(self, batch: NestedMap) -> NestedMap:
        """Return a batch that all processes hold as one that they share, `[rows, …]`."""
        if jax.process_count() == 1:
            return batch
        sharding = self.job.partitioner.batch_sharding()
        make = jax.make_array_from_callback
        return jax.tree.map(lambda x: make(x.shape, sharding, x.__getitem__), batch)

    def _compile(
        self, function: Callable[..., Any], *fixed: Any, shardings: Sequence[Any], **options: Any
    ) -> Callable[..., Any]:
        """Return `function(model, *fixed, variables, …)`, jitted for a state and kept."""
        key = (function, *fixed)
        if key not in self._compiled:
            task, model = self.job.task, self.model

            def call(state: TrainState, *rest: Any) -> Any:
                return function(model, *fixed, task.decoded_variables(state), *rest)

            jit = self.job.partitioner.jit_reading
            self._compiled[key] = jit(task, call, *shardings, **options)
        return self._compiled[key]

    def _pad_to_bucket(self, ids: np.ndarray) -> NestedMap:
        rows, length = ids.shape
        shape = (self._buckets.rows(rows), self._buckets.length(length))
        padded, lengths = np.zeros(shape, np.int32), np.zeros(shape[0], np.int32)
        padded[:rows, :length], lengths[:rows] = ids, length
        return NestedMap(ids=padded, lengths=lengths)
