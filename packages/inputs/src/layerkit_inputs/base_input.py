"""BaseInput: what every source of batches looks like to a training, eval or decode program.

A reader writes few lines: `_next` makes a batch or raises StopIteration, `_reset` goes back to the
start, and, where it can jump, `_reader_state` and `_set_reader_state` tell and take a position. All
else (peek, exact states, padding, the evaluation loop, passes over finite data) is here, once.

A subclass may also change batches the way Pax's users do, by overriding `get_next`:

    class MyInput(SomeInput):
        def get_next(self):
            batch = super().get_next()
            batch.new_field = ...
            return batch

Only the outermost `get_next` of a call is a delivery: peek keeps what it returned, so the change is
seen by peek, made once, and counted once. A class that defines nothing but `get_next` and `reset`,
the whole interface in Pax, has all the rest too: where the stream is to be endless, its
StopIteration makes it begin again.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from layerkit.config import Configurable
from layerkit.errors import ConfigError
from layerkit.nested_map import NestedMap
from layerkit_inputs import state as state_lib
from layerkit_inputs.error_notes import naming_input
from layerkit_inputs.eval_padding import AllGather, end_together, mark_rows, pad_rows


def exit_as_error(source: BaseInput, error: BaseException) -> BaseException:
    """Return an error that names the input in place of SystemExit and GeneratorExit.

    Python gives these two a meaning of their own: the first ends a process with an exit code, the
    second ends a generator. Raised by an input, they are faults of the input.

    Args:
      source: Input that raised `error`.
      error: Any exception.

    Returns:
      A RuntimeError for these two, `error` itself otherwise.
    """
    if not isinstance(error, (SystemExit, GeneratorExit)):
        return error
    wrapped = RuntimeError(
        f"{source._label}: reading the next batch raised {error!r}. Expected a batch, "
        "StopIteration or an error. Raise an error that says what is wrong with the data."
    )
    wrapped.__cause__ = error
    return wrapped


def _delivers(get_next: Callable[..., NestedMap]) -> Callable[..., NestedMap]:
    """Makes the outermost of a chain of `get_next` calls serve and count what is delivered."""

    @functools.wraps(get_next)
    def deliver(self: BaseInput) -> NestedMap:
        if self._is_delivering:
            return get_next(self)
        if self._is_closed:
            raise RuntimeError(f"{self!r} is closed.")
        if self._peeked is not None:
            batch, self._peeked = self._peeked, None
            return batch
        self._is_delivering = True
        try:
            with naming_input(self._label):
                batch = get_next(self)
        except StopIteration:
            if not self.endless:
                raise
            with naming_input(self._label):
                batch = self._begin_again(get_next)
        except (SystemExit, GeneratorExit) as error:
            raise exit_as_error(self, error) from error
        finally:
            self._is_delivering = False
        self._num_delivered += 1
        return batch

    return deliver


def _starts_over(reset: Callable[..., None]) -> Callable[..., None]:
    """Makes a `reset` method forget what was peeked and counted, also one that replaces ours."""

    @functools.wraps(reset)
    def start_over(self: BaseInput) -> None:
        self._peeked = None
        self._num_delivered = 0
        reset(self)

    return start_over


class BaseInput(Configurable):
    """A source of batches: NestedMaps of numpy arrays `[batch, ...]`, one after the other.

    Every host builds its own, told apart by `infeed_host_index`. `StopIteration` is the only end.
    What evaluation reads follows from three fields; left unset they mean one epoch each time:

    | reset_for_eval | repeat | an evaluation reads |
    |---|---|---|
    | True | False | one whole epoch, from the start; `eval_loop_num_batches` is ignored |
    | False | True | the next `eval_loop_num_batches` batches of an endless stream |

    Training inputs are endless.
    """

    name: str | None = None
    """Shown in logs and summaries."""
    batch_size: int | None = None
    """Rows of a batch on this host. Required; the runner derives it from `percore_batch_size`."""
    percore_batch_size: float | None = None
    """Rows per device, a fraction where several devices share a row; read by the runner alone."""
    infeed_host_index: int = 0
    """Which of the hosts that feed data this is; the runner sets it."""
    num_infeed_hosts: int = 1
    """How many hosts feed data; the runner sets it."""
    is_training: bool = False
    """Endless, and shuffled where the reader shuffles."""
    reset_for_eval: bool | None = None
    """Each evaluation begins at the start. None: True unless the stream is endless."""
    repeat: bool | None = None
    """Begin again at the end of the data. None: as the other fields imply."""
    eval_loop_num_batches: int | None = None
    """Batches of one evaluation, where the stream is endless."""
    input_random_seed: int | None = None
    """Seed of order and contents. None: 0, since a resumed run goes on and repeats nothing."""
    batch_padding_size: int = 0
    """Rows of padding that `get_next_padded` appends to each batch."""

    token_unit: ClassVar[str] = "token"
    """What one predicted token is, for reports; nats per `byte` compare across models."""

    state_scope: ClassVar[state_lib.Scope] = "host"
    """`global` for a reader whose state is the same on every host and fits any number of them."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "get_next" in cls.__dict__:
            cls.get_next = _delivers(cls.__dict__["get_next"])  # type: ignore[method-assign]
        if "reset" in cls.__dict__:
            cls.reset = _starts_over(cls.__dict__["reset"])  # type: ignore[method-assign]

    def __post_init__(self) -> None:
        self._peeked: NestedMap | None = None
        self._state_before_peek: dict[str, Any] | None = None
        self._is_delivering = False
        self._is_closed = False
        self._num_delivered = 0
        self._check_fields()
        self._settle_passes()

    # What a reader writes.

    def _next(self) -> NestedMap:
        """The next batch of this host; raises StopIteration at the end of the data."""
        raise NotImplementedError(f"{type(self).__qualname__} must define _next() or get_next().")

    def _reset(self) -> None:
        """Goes back to the first batch."""
        raise NotImplementedError(f"{type(self).__qualname__} must define _reset().")

    def _reader_state(self) -> dict[str, Any]:
        """The reader's position, as JSON values. Default: the number of batches delivered."""
        return {"num_delivered": self._num_delivered}

    def _set_reader_state(self, position: dict[str, Any]) -> None:
        """Goes to a position. Default: from the start, reading past what was delivered."""
        self.reset()
        for _ in range(position["num_delivered"]):
            self.get_next()

    def _close(self) -> None:
        """Lets go of files and threads."""

    # What programs call.

    @_delivers
    def get_next(self) -> NestedMap:
        """The next batch, arrays `[batch, ...]`.

        Raises:
          StopIteration: the data has ended (never while training or repeating).
        """
        try:
            return self._next()
        except StopIteration:
            if not self.endless:
                raise
        # Here already, so that a subclass's `get_next` may put together a batch across the end.
        return self._begin_again(lambda self: self._next())

    def get_next_padded(self) -> NestedMap:
        """`get_next` and `batch_padding_size` rows of padding (weight 0, provenance -1)."""
        return pad_rows(self.get_next(), self.batch_padding_size, copy=False)

    def peek(self) -> NestedMap:
        """The batch that `get_next` will return, without consuming it; the map is a copy."""
        if self._peeked is None:
            before = self._envelope()
            batch = self.get_next()
            self._peeked, self._state_before_peek = batch, before
        return self._peeked.transform(lambda leaf: leaf)

    @_starts_over
    def reset(self) -> None:
        """Back to the first batch; what was peeked is forgotten."""
        self._reset()

    def get_state(self) -> dict[str, Any]:
        """Where the stream stands, as JSON values; a batch only peeked at is still to come."""
        if self._peeked is not None:
            assert self._state_before_peek is not None
            return self._state_before_peek
        with naming_input(self._label):
            return self._envelope()

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes to where `get_state` was called, on an input of the same fields.

        Raises:
          ValueError: the state is of another kind of reader, another host or other data.
        """
        self._peeked = None
        with naming_input(self._label):
            self._set_envelope(state)

    def _begin_again(self, get_next: Callable[[Any], NestedMap]) -> NestedMap:
        """The first batch of the next pass; the count of what was delivered goes on."""
        num_delivered = self._num_delivered
        self.reset()
        self._num_delivered = num_delivered
        try:
            return get_next(self)
        except StopIteration:
            raise ValueError(f"{self!r} is to repeat its data, but there is none.") from None

    def _envelope(self) -> dict[str, Any]:
        return state_lib.pack_state(self._reader_state(), **self._state_owner())

    def _set_envelope(self, envelope: dict[str, Any]) -> None:
        self._set_reader_state(state_lib.unpack_state(envelope, **self._state_owner()))

    def _state_owner(self) -> dict[str, Any]:
        return {
            "reader": type(self).__qualname__,
            "scope": self.state_scope,
            "host_index": self.infeed_host_index,
            "num_hosts": self.num_infeed_hosts,
        }

    def eval_batches(self, all_gather: AllGather | None = None) -> Iterator[NestedMap]:
        """The padded batches of one evaluation: an epoch, or the next `eval_loop_num_batches`.

        Args:
          all_gather: Takes a JSON value of this host and returns those of all hosts, in order. With
            it, epochs of readers whose shares are not planned from an index (`state_scope` is
            `host`) end together: a host whose data have ended goes on with batches of padding.

        Returns:
          The batches. Where there may be rows of padding, `eval_sample_weights` marks them, unless
          the reader marks them itself (by `provenance` or `eval_sample_weights`).
        """
        if self.reset_for_eval:
            self.reset()
        batches = self._eval_batches_of_this_host()
        if all_gather is None or self.endless or self.state_scope == "global":
            return batches
        return end_together(batches, all_gather)

    def _eval_batches_of_this_host(self) -> Iterator[NestedMap]:
        most = None if self.reset_for_eval else self.eval_loop_num_batches
        for _ in itertools.count() if most is None else range(most):
            try:
                batch = self.get_next_padded()
            except StopIteration:  # the end of an epoch; a stream that repeats has none
                return
            has_padding = self.batch_padding_size > 0
            yield mark_rows(batch, self.batch_padding_size) if has_padding else batch

    # Metrics that belong to the data, such as those of a SeqIO task.

    @property
    def has_score_metrics(self) -> bool:
        """Whether `score_metrics` wants the scores of an evaluation."""
        return False

    @property
    def has_prediction_metrics(self) -> bool:
        """Whether `prediction_metrics` wants what was decoded."""
        return False

    def score_metrics(self, scores: Mapping[int, float]) -> dict[str, float]:
        """Metrics of one evaluation of this data, from the scores that a model gave its examples.

        Args:
          scores: By `provenance`, each example of all hosts exactly once: log-probability of its
            labels in nats, summed under their weights.
        """
        return {}

    def prediction_metrics(self, predictions: Mapping[int, str]) -> dict[str, float]:
        """Metrics of what a model continued the examples of this data with.

        Args:
          predictions: By `provenance`, each example of all hosts exactly once: the text.
        """
        return {}

    @property
    def num_skipped(self) -> int:
        """Records that this host could not read and left out so far; see `bad_records`."""
        return 0

    def ids_to_strings(
        self, ids: np.ndarray, lengths: np.ndarray | Sequence[int], key: str | None = None
    ) -> list[str]:
        """Text of token ids.

        Args:
          ids: int `[batch, length]`.
          lengths: int `[batch]`; ids beyond them are not read.
          key: Which vocabulary, where a reader has several (such as `src` and `tgt`).
        """
        raise NotImplementedError(
            f"{type(self).__qualname__} has no vocabulary to decode ids with."
        )

    def text_tokenizer(self, key: str | None = None) -> Any:
        """Return the tokenizer that made the ids, or None if the input has none.

        Args:
          key: As for `ids_to_strings`.
        """
        return None

    def baselines(self) -> dict[str, float]:
        """Losses to compare a model's with on this data: name -> nats per token. Default: none."""
        return {}

    def close(self) -> None:
        """Lets go of files and threads; may be called again."""
        if not self._is_closed:
            self._is_closed = True
            self._peeked = None
            self._close()

    @property
    def endless(self) -> bool:
        """Whether the stream never ends."""
        return self.is_training or bool(self.repeat)

    @classmethod
    def blank_batch(cls, config: Any, rows: int) -> NestedMap | None:
        """What a training batch looks like, told by the fields alone: all zeros, nothing read.

        So a training step can be planned where the data are not.

        Args:
          config: Of this class; its data need not be there.
          rows: Rows of the batch.

        Returns:
          The names, shapes and dtypes of what `get_next` returns; None where only the data tell.
        """
        return None

    @classmethod
    def get_batch_size(cls, config: Any) -> int | None:
        """Rows of a batch on each host that a config asks for; None where it does not say.

        A reader whose batches are made by something else, which has a size of its own, tells that.
        """
        return config.batch_size

    @property
    def local_batch_size(self) -> int:
        """Rows of a batch on this host."""
        assert self.batch_size is not None
        return self.batch_size

    @property
    def global_batch_size(self) -> int:
        """Rows of a batch over all hosts."""
        return self.local_batch_size * self.num_infeed_hosts

    # Field values that cannot work are refused when the input is built.

    @property
    def _label(self) -> str:
        """Class and name, as error messages show them: `LocalText 'train'`."""
        return type(self).__qualname__ + (f" {self.name!r}" if self.name else "")

    def _config_error(self, problem: str = "", **data: Any) -> ConfigError:
        """Return a `ConfigError` of this input; `data` are attributes of the error."""
        return ConfigError(problem, owner=self._label, **data)

    def _check_at_least(self, least: int, *fields: str) -> None:
        """Refuses fields that are set, to less than `least`."""
        for field in fields:
            value = getattr(self, field)
            if value is not None and value < least:
                raise self._config_error(f"{field}={value}; expected at least {least}.")

    def _check_fields(self) -> None:
        if self.batch_size is None:
            raise self._config_error(
                "batch_size is not set; give the rows of a batch on each host."
            )
        self._check_at_least(1, "batch_size")
        if not 0 <= self.infeed_host_index < self.num_infeed_hosts:
            raise self._config_error(
                f"infeed_host_index={self.infeed_host_index} with num_infeed_hosts="
                f"{self.num_infeed_hosts}; expected 0 <= infeed_host_index < num_infeed_hosts."
            )
        if self.eval_loop_num_batches is not None and self.eval_loop_num_batches < 1:
            raise self._config_error(
                f"eval_loop_num_batches={self.eval_loop_num_batches}; expected at least 1, or None "
                "for one epoch."
            )
        if self.batch_padding_size < 0:
            raise self._config_error(
                f"batch_padding_size={self.batch_padding_size}; expected >= 0."
            )

    def _settle_passes(self) -> None:
        """Fills in `reset_for_eval` and `repeat` where unset, and refuses what cannot work."""
        if self.is_training:
            self._settle_training()
        else:
            self._settle_eval()

    def _settle_training(self) -> None:
        if self.reset_for_eval:
            raise self._config_error(
                "reset_for_eval=True with is_training=True; training data is never reset. Leave "
                "reset_for_eval unset, or set is_training=False for evaluation."
            )
        if self.repeat is False:
            raise self._config_error(
                "repeat=False with is_training=True; training data is endless. Leave repeat unset "
                "and end training by its number of steps."
            )
        self.reset_for_eval, self.repeat = False, True

    def _settle_eval(self) -> None:
        reset, repeat = self.reset_for_eval, self.repeat
        if reset is None and repeat is None:
            repeat = self.eval_loop_num_batches is not None
        reset = not repeat if reset is None else reset
        repeat = not reset if repeat is None else repeat
        if reset and repeat:
            raise self._config_error(
                "reset_for_eval=True with repeat=True; an epoch that repeats never ends. Set "
                "repeat=False for one epoch, or reset_for_eval=False with eval_loop_num_batches."
            )
        if not reset and not repeat:
            raise self._config_error(
                "reset_for_eval=False with repeat=False; the data would run out. Set repeat=True "
                "with eval_loop_num_batches, or reset_for_eval=True for one epoch each time."
            )
        if repeat and self.eval_loop_num_batches is None:
            raise self._config_error(
                "repeat=True without eval_loop_num_batches; an evaluation would never end. Set "
                "eval_loop_num_batches, or reset_for_eval=True and repeat=False for one epoch."
            )
        self.reset_for_eval, self.repeat = reset, repeat


def __getattr__(name: str) -> Any:
    """The adaptors for Lingvo, which Praxis keeps in this module; loaded when one is asked for."""
    if name.startswith("Lingvo"):
        from layerkit_inputs import lingvo_adaptor

        return getattr(lingvo_adaptor, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
