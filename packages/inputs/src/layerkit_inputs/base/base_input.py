"""BaseInput, the base class of all inputs of training, evaluation and decoding programs.

A reader defines `_next`, which returns a batch or raises StopIteration, and `_reset`, which returns
to the start. A reader with random access also defines `_reader_state` and `_set_reader_state`,
which return and restore a position. BaseInput provides everything else: peeking, exact states,
padding, the evaluation loop and passes over finite data.

A subclass may also change batches as in Pax, by overriding `get_next`:

    class MyInput(SomeInput):
        def get_next(self):
            batch = super().get_next()
            batch.new_field = ...
            return batch

Only the outermost `get_next` of a call counts as a delivered batch. `peek` caches its result, so
the change is visible to `peek`, applied once and counted once. A class that defines only `get_next`
and `reset`, the complete interface in Pax, has all other features too. If its stream is endless,
its StopIteration restarts it. `tf.errors.OutOfRangeError` has the effect of StopIteration.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np

from layerkit.config import Configurable
from layerkit.config.checks import check_integers, require
from layerkit.config.hparams import check_fields
from layerkit.config.nested_map import NestedMap
from layerkit.errors import ConfigError
from layerkit_inputs.base.errors import BadRecords, check_same_data, naming_input
from layerkit_inputs.base.evaluation import (
    AllGather,
    Evaluation,
    choose_passes,
    end_together,
    mark_rows,
    pad_rows,
)
from layerkit_inputs.base.tokenizer_interface import SpecialIds, lost_text, prefix_id

Scope = Literal["global", "host"]
NUM_FIRST_TEXTS = 3
"""Largest number of documents of which the tokenizer is checked."""
FIRST_TEXT_BYTES = 1 << 14
"""Largest number of bytes of such a document that are checked."""

# Module and name of `tf.errors.OutOfRangeError`, which is recognized without TensorFlow.
_OUT_OF_RANGE = ("tensorflow.python.framework.errors_impl", "OutOfRangeError")


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, such as `1 file` or `1,234 files`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _delivers(get_next: Callable[[Any], NestedMap]) -> Callable[[Any], NestedMap]:
    """Decorate a `get_next` method so that it returns a peeked batch first, and counts batches.

    A call from another `get_next`, as by `super()`, only reads.
    """

    @functools.wraps(get_next)
    def deliver(self: BaseInput) -> NestedMap:
        def read() -> NestedMap:
            return _read_to_end(lambda: get_next(self))

        if self._is_delivering:
            return read()
        if self._is_closed:
            raise RuntimeError(f"{self!r} is closed.")
        if self._peeked is not None:
            batch, self._peeked = self._peeked, None
            return batch
        self._is_delivering = True
        try:
            with naming_input(self._label):
                try:
                    batch = read()
                except StopIteration:
                    if not self.endless:
                        raise
                    batch = self._begin_again(read)
        finally:
            self._is_delivering = False
        self._num_delivered += 1
        return batch

    return deliver


def _read_to_end(read: Callable[[], NestedMap]) -> NestedMap:
    """Return the next batch. TensorFlow's OutOfRangeError becomes StopIteration."""
    try:
        return read()
    except Exception as error:
        kinds = type(error).__mro__
        if any((kind.__module__, kind.__name__) == _OUT_OF_RANGE for kind in kinds):
            raise StopIteration from error
        raise


def _starts_over(reset: Callable[[Any], None]) -> Callable[[Any], None]:
    """Decorate a `reset` method so that it discards the peeked batch and the count of batches."""

    @functools.wraps(reset)
    def start_over(self: BaseInput) -> None:
        self._peeked = None
        self._num_delivered = 0
        reset(self)

    return start_over


class BaseInput(Configurable):
    """A source of batches, which are NestedMaps of NumPy arrays `[batch, ...]`.

    Every host builds its own instance with its own `infeed_host_index`. StopIteration marks the end
    of the data. Training inputs are endless. An evaluation reads one epoch, or with
    `eval_loop_num_batches` the next batches of an endless stream; see the table in `evaluation`.
    """

    name: str | None = None
    """Name in logs and summaries."""
    batch_size: int | None = None
    """Rows of a batch on this host. Required. The runner derives it from `percore_batch_size`."""
    percore_batch_size: float | None = None
    """Rows per device, a fraction if several devices share a row. Read only by the runner."""
    infeed_host_index: int = 0
    """Index of this host among the hosts that feed data. Set by the runner."""
    num_infeed_hosts: int = 1
    """Number of hosts that feed data. Set by the runner."""
    is_training: bool = False
    """Whether the stream is endless, and shuffled if the reader supports it."""
    reset_for_eval: bool | None = None
    """Whether each evaluation begins at the start. None: True unless the stream is endless."""
    repeat: bool | None = None
    """Whether to restart at the end of the data. None: derived from the other fields."""
    eval_loop_num_batches: int | None = None
    """Number of batches of one evaluation, at most. None: all batches of an epoch."""
    input_random_seed: int | None = None
    """Seed of order and contents. None: 0, since a resumed run continues and repeats no batch."""
    batch_padding_size: int = 0
    """Number of rows of padding that `get_next_padded` appends to each batch."""

    token_unit: ClassVar[str] = "token"
    """Unit of one predicted token in reports. Nats per `byte` can be compared across models."""
    state_scope: ClassVar[Scope] = "host"
    """`global` if the state is the same on every host and fits any number of hosts."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Decorate the `get_next` and `reset` methods of a subclass."""
        super().__init_subclass__(**kwargs)
        if "get_next" in cls.__dict__:
            cls.get_next = _delivers(cls.__dict__["get_next"])  # type: ignore[method-assign]
        if "reset" in cls.__dict__:
            cls.reset = _starts_over(cls.__dict__["reset"])  # type: ignore[method-assign]

    def __post_init__(self) -> None:
        """Check the fields and derive `reset_for_eval` and `repeat`."""
        self._peeked: NestedMap | None = None
        self._state_before_peek: dict[str, Any] = {}
        self._is_delivering = False
        self._is_closed = False
        self._num_delivered = 0
        self._check_fields()
        self._resolve_passes()
        # A reader that skips records declares the field.
        self._bad = BadRecords(getattr(self, "on_bad_record", "refuse"))

    # Methods that a reader defines.

    def _next(self) -> NestedMap:
        """Return the next batch of this host, or raise StopIteration at the end of the data."""
        raise NotImplementedError(f"{type(self).__qualname__} must define _next() or get_next().")

    def _reset(self) -> None:
        """Return to the first batch."""
        raise NotImplementedError(f"{type(self).__qualname__} must define _reset().")

    def _reader_state(self) -> dict[str, Any]:
        """Return the reader's position as JSON values. Default: number of batches delivered."""
        return {"num_delivered": self._num_delivered}

    def _set_reader_state(self, position: dict[str, Any]) -> None:
        """Restore a position. Default: read and discard the delivered batches from the start."""
        self.reset()
        for _ in range(position["num_delivered"]):
            self.get_next()

    def _fingerprint(self) -> dict[str, Any]:
        """Return, once, JSON values by which `IndexedInput` and `GrainStream` compare data."""
        return {}

    @functools.cached_property
    def _cached_fingerprint(self) -> dict[str, Any]:
        return self._fingerprint()

    def _data_text(self) -> str:
        """Return the files, documents and bytes of the data. Large data sets are not counted."""
        return "documents not counted"

    def _first_texts(self) -> list[bytes]:
        """Return the beginnings of the first documents in UTF-8, or [] if they are unknown.

        At most `NUM_FIRST_TEXTS` texts of `FIRST_TEXT_BYTES` each.
        """
        return []

    def _close(self) -> None:
        """Release files and threads."""

    # Methods that programs call.

    @_delivers
    def get_next(self) -> NestedMap:
        """Return the next batch, arrays `[batch, ...]`.

        A subclass returns new arrays for each batch: on CPUs, JAX may share their memory.

        Raises:
          StopIteration: the data has ended (never while training or repeating).
        """
        try:
            return _read_to_end(self._next)
        except StopIteration:
            if not self.endless:
                raise
        # Restarting here lets a subclass's `get_next` build a batch across the end of the data.
        return self._begin_again(lambda: _read_to_end(self._next))

    def get_next_padded(self) -> NestedMap:
        """Return the next batch with `batch_padding_size` more rows (weight 0, provenance -1)."""
        return pad_rows(self.get_next(), self.batch_padding_size, copy=False)

    def peek(self) -> NestedMap:
        """Return the next batch without consuming it. Its arrays must not be changed."""
        if self._peeked is None:
            before = self._envelope()
            batch = self.get_next()
            self._peeked, self._state_before_peek = batch, before
        return self._peeked.transform(lambda leaf: leaf)

    @_starts_over
    def reset(self) -> None:
        """Return to the first batch and discard a peeked batch."""
        self._reset()

    def get_state(self) -> dict[str, Any]:
        """Return the position of the stream as JSON values; a peeked batch is not yet consumed.

        It also names the reader and, for a `state_scope` of `host`, the host and the number of all.
        """
        if self._peeked is not None:
            return self._state_before_peek
        with naming_input(self._label):
            return self._envelope()

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore a position that `get_state` returned, on an input with the same fields.

        Raises:
          ConfigError: The state belongs to another kind of reader, another host or other data.
        """
        self._peeked = None
        with naming_input(self._label):
            try:
                self._set_envelope(state)
            except (AttributeError, LookupError, TypeError) as error:
                expected = f"a state that get_state() returned ({type(error).__name__}: {error})"
                raise self._config_error(
                    "cannot restore", field="state", value=state, expected=expected
                ) from error

    def _begin_again(self, get_next: Callable[[], NestedMap]) -> NestedMap:
        """Return the first batch of the next pass, and keep the count of delivered batches."""
        num_delivered = self._num_delivered
        self.reset()
        self._num_delivered = num_delivered
        try:
            return get_next()
        except StopIteration:
            raise self._config_error(
                "an endless input has no batch to repeat", hint="Check that its data are not empty."
            ) from None

    def _envelope(self) -> dict[str, Any]:
        return {**self._state_owner(), "position": copy.deepcopy(self._reader_state())}

    def _set_envelope(self, envelope: dict[str, Any]) -> None:
        then = {name: value for name, value in envelope.items() if name != "position"}
        check_same_data(self._label, then, self._state_owner(), field="state")
        self._set_reader_state(copy.deepcopy(envelope["position"]))

    def _state_owner(self) -> dict[str, Any]:
        hosts = [self.infeed_host_index, self.num_infeed_hosts]
        owner = {"host": hosts} if self.state_scope == "host" else {}
        return {"reader": type(self).__qualname__, "scope": self.state_scope, **owner}

    def eval_batches(self, all_gather: AllGather | None = None) -> Iterator[NestedMap]:
        """Return the padded batches of one evaluation; see the table in `evaluation`.

        Args:
          all_gather: Function from a JSON value of this host to those of all hosts, in order. If
            given, all hosts return the same number of batches. A host at the end of its data
            returns batches of padding. Readers with `state_scope` `global` do not need it.

        Returns:
          The batches. If a batch may have rows of padding, `eval_sample_weights` marks them, unless
          the reader marks them itself by `provenance` or `eval_sample_weights`.
        """
        if self.reset_for_eval:
            self.reset()
        batches = self._eval_batches_of_this_host()
        if all_gather is None or self.endless or self.state_scope == "global":
            return batches
        return end_together(batches, all_gather)

    def _eval_batches_of_this_host(self) -> Iterator[NestedMap]:
        most = self.eval_loop_num_batches
        for _ in itertools.count() if most is None else range(most):
            try:
                batch = self.get_next_padded()
            except StopIteration:  # the end of an epoch
                return
            has_padding = self.batch_padding_size > 0
            yield mark_rows(batch, self.batch_padding_size) if has_padding else batch

    # Metrics that belong to the data, such as those of a SeqIO task.

    @property
    def has_score_metrics(self) -> bool:
        """Whether `score_metrics` reads the scores of an evaluation."""
        return False

    @property
    def has_prediction_metrics(self) -> bool:
        """Whether `prediction_metrics` reads decoded text."""
        return False

    def score_metrics(self, scores: Mapping[int, float]) -> dict[str, float]:
        """Compute metrics of one evaluation of this data from a model's scores of its examples.

        Args:
          scores: Log-probability of an example's labels in nats, summed with their weights, by
            `provenance`. Each example of all hosts occurs exactly once.
        """
        return {}

    def prediction_metrics(self, predictions: Mapping[int, str]) -> dict[str, float]:
        """Compute metrics of a model's continuations of the examples of this data.

        Args:
          predictions: Decoded text by `provenance`. Each example of all hosts occurs exactly once.
        """
        return {}

    @property
    def num_skipped(self) -> int:
        """Number of unreadable records that this host has skipped so far; see `BadRecords`."""
        return self._bad.num_skipped

    def ids_to_strings(
        self, ids: np.ndarray, lengths: np.ndarray | Sequence[int], key: str | None = None
    ) -> list[str]:
        """Decode token ids, by default with `text_tokenizer`, without special ids.

        Args:
          ids: int `[batch, length]`.
          lengths: int `[batch]`. Ids beyond them are ignored.
          key: Vocabulary of a reader that has several, such as `src` or `tgt`.
        """
        tokenizer = self.text_tokenizer(key)
        if tokenizer is None:
            raise NotImplementedError(f"{type(self).__qualname__} has no vocabulary for ids.")
        return [tokenizer.decode(row[:n]) for row, n in zip(ids, lengths, strict=True)]

    def text_tokenizer(self, key: str | None = None) -> Any:
        """Return the tokenizer that made the ids, or None if the input has none.

        Args:
          key: Same as in `ids_to_strings`.
        """
        return getattr(self, "_tokenizer", None)

    def describe_data(self) -> list[str]:
        """Return lines about the data that this input reads, for the report at a start.

        They state files, documents and bytes, and the characters of the first documents that the
        tokenizer loses.
        """
        with naming_input(self._label):
            lines = [f"{type(self).__qualname__}, {self._data_text()}"]
            tokenizer, texts = self.text_tokenizer(), self._first_texts()
        if tokenizer is not None and (lost := lost_text(tokenizer, texts)):
            lines.append(f"WARNING: the tokenizer loses {lost}")
        return lines

    def special_ids(self) -> SpecialIds | None:
        """Return the ids that begin, end and pad a text, or None if the input has no tokenizer."""
        tokenizer = self.text_tokenizer()
        if tokenizer is None:
            return None
        return SpecialIds(prefix_id(tokenizer), tokenizer.eos_id, tokenizer.pad_id)

    def baselines(self) -> dict[str, float]:
        """Return reference losses on this data in nats per token, by name. Default: none."""
        return {}

    def close(self) -> None:
        """Release files and threads. Further calls have no effect."""
        if not self._is_closed:
            self._is_closed = True
            self._peeked = None
            self._close()

    @property
    def endless(self) -> bool:
        """Whether the stream never ends."""
        return self.is_training or bool(self.repeat)

    @property
    def evaluates(self) -> Evaluation:
        """What one evaluation reads; see the table in `evaluation`."""
        return "epoch" if self.reset_for_eval else "next"

    @classmethod
    def blank_batch(cls, config: Any, rows: int) -> NestedMap | None:
        """Return a training batch of zeros without reading data.

        With it, a training step can be compiled on a machine that does not have the data.

        Args:
          config: Config of this class. Its data need not exist.
          rows: Number of rows of the batch.

        Returns:
          A batch with the names, shapes and dtypes of `get_next`, or None if they depend on the
          data.
        """
        return None

    @classmethod
    def get_batch_size(cls, config: Any) -> int | None:
        """Return the rows of a batch on each host by a config, or None if it does not define them.

        Readers of batches that another library makes return the batch size of that library.
        """
        return config.batch_size

    @property
    def local_batch_size(self) -> int:
        """Number of rows of a batch on this host."""
        assert self.batch_size is not None
        return self.batch_size

    @property
    def global_batch_size(self) -> int:
        """Number of rows of a batch over all hosts."""
        return self.local_batch_size * self.num_infeed_hosts

    @property
    def _label(self) -> str:
        """Class and name in error messages, such as `LocalText 'train'`."""
        return type(self).__qualname__ + (f" {self.name!r}" if self.name else "")

    def _config_error(self, problem: str = "", **data: Any) -> ConfigError:
        """Return a `ConfigError` of this input; `data` are attributes of the error."""
        return ConfigError(problem, owner=self._label, **data)

    def _check_at_least(self, minimum: int, *fields: str) -> None:
        """Raise `ConfigError` unless each field is an integer of at least `minimum`, or None."""
        values = {field: getattr(self, field) for field in fields}
        check_integers(self._label, minimum=minimum, **values)

    def _check_fields(self) -> None:
        """Check the types of all fields, since an input need not be made from a config."""
        check_fields(self, owner=self._label)
        rows = "the number of rows of a batch on each host"
        require(self.batch_size is not None, self._label, "batch_size", None, rows)
        self._check_at_least(1, "batch_size", "eval_loop_num_batches")
        self._check_at_least(0, "batch_padding_size", "input_random_seed")
        index, count = self.infeed_host_index, self.num_infeed_hosts
        expected = f"an index in [0, num_infeed_hosts={count})"
        require(0 <= index < count, self._label, "infeed_host_index", index, expected)

    def _resolve_passes(self) -> None:
        """Derive `reset_for_eval` and `repeat` from the table of evaluations."""
        self.reset_for_eval, self.repeat = choose_passes(
            (self.reset_for_eval, self.repeat),
            self.eval_loop_num_batches,
            is_training=self.is_training,
            owner=self._label,
        )
