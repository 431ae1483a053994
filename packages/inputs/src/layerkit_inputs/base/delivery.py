"""Decorators of the methods `_next`, `get_next` and `reset` of inputs.

`BaseInput` applies them to each subclass, whichever of these methods it overrides. They return a
peeked batch first, count delivered batches, and raise StopIteration at the end of the data.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

from layerkit.config.nested_map import NestedMap
from layerkit_inputs.base.errors import naming_input

if TYPE_CHECKING:
    from layerkit_inputs.base.base_input import BaseInput

# Module and name of `tf.errors.OutOfRangeError`.
_OUT_OF_RANGE = ("tensorflow.python.framework.errors_impl", "OutOfRangeError")


def exit_as_error(source: BaseInput, error: BaseException) -> BaseException:
    """Replace SystemExit and GeneratorExit by an error that names the input.

    An input that raises one of them has a bug. SystemExit would end the process with an exit code,
    and GeneratorExit would end a generator.

    Args:
      source: Input that raised `error`.
      error: Any exception.

    Returns:
      A RuntimeError for these two types, `error` itself otherwise.
    """
    if not isinstance(error, (SystemExit, GeneratorExit)):
        return error
    wrapped = RuntimeError(
        f"{source._label}: reading the next batch raised {error!r}. Expected a batch, "
        "StopIteration or an error. Raise an error that says what is wrong with the data."
    )
    wrapped.__cause__ = error
    return wrapped


def delivers(get_next: Callable[..., NestedMap]) -> Callable[..., NestedMap]:
    """Decorate a `get_next` method so that it returns a peeked batch first, and counts batches.

    A call from another `get_next`, as by `super()`, only reads.
    """

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
            with naming_input(self):
                batch = get_next(self)
        except StopIteration:
            if not self.endless:
                raise
            with naming_input(self):
                batch = self._begin_again(get_next)
        except (SystemExit, GeneratorExit) as error:
            raise exit_as_error(self, error) from error
        finally:
            self._is_delivering = False
        self._num_delivered += 1
        return batch

    return deliver


def ends(read: Callable[..., NestedMap]) -> Callable[..., NestedMap]:
    """Decorate `_next` or `get_next` so that TensorFlow's OutOfRangeError becomes StopIteration."""

    @functools.wraps(read)
    def read_to_end(self: BaseInput) -> NestedMap:
        try:
            return read(self)
        except Exception as error:
            if _is_out_of_range(error):
                raise StopIteration from error
            raise

    return read_to_end


def _is_out_of_range(error: Exception) -> bool:
    """Return whether an error is `tf.errors.OutOfRangeError`, without importing TensorFlow."""
    return any((kind.__module__, kind.__name__) == _OUT_OF_RANGE for kind in type(error).__mro__)


def starts_over(reset: Callable[..., None]) -> Callable[..., None]:
    """Decorate a `reset` method so that it discards the peeked batch and the count of batches."""

    @functools.wraps(reset)
    def start_over(self: BaseInput) -> None:
        self._peeked = None
        self._num_delivered = 0
        reset(self)

    return start_over
