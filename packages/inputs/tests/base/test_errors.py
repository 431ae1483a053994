"""Errors of an input know its class and name."""

from __future__ import annotations

import contextlib
import errno
from typing import Any

import numpy as np
import pytest

from layerkit.config.nested_map import NestedMap
from layerkit_inputs import IndexedInput, Mixture, Prefetch
from layerkit_inputs.base.errors import BadRecordError, as_bad_record, input_of


class Failing(IndexedInput):
    error: Any = None

    def _num_rows(self) -> int:
        return 8

    def _read_rows(self, rows: np.ndarray) -> NestedMap:
        raise self.error


def failure(error: Exception, *, ahead: bool, name: str | None = "web") -> BaseException:
    source = Failing(batch_size=4, name=name, error=error)
    reader = Prefetch(source=source) if ahead else source
    with contextlib.closing(reader), pytest.raises(type(error)) as caught:
        reader.get_next()
    return caught.value


@pytest.mark.parametrize("ahead", [False, True], ids=["itself", "prefetch"])
def test_errors_know_their_input_and_tracebacks_show_it(ahead: bool):
    error = failure(IndexError("7"), ahead=ahead)
    assert input_of(error) == "Failing 'web'"
    assert error.__notes__ == ["In input Failing 'web'"]


@pytest.mark.parametrize("error", [ValueError("no such shape"), FileNotFoundError("a.txt")])
def test_errors_of_data_keep_their_text(error: Exception):
    caught = failure(error, ahead=True, name=None)
    assert input_of(caught) == "Failing"
    assert not hasattr(caught, "__notes__")


def test_end_of_data_is_no_error_of_an_input():
    source = Failing(batch_size=4, error=StopIteration())
    with pytest.raises(StopIteration) as caught:
        source.get_next()
    assert input_of(caught.value) is None


def test_component_of_a_mixture_is_named_by_the_mixture_that_reads_it():
    config = Failing.HParams.config(error=KeyError("x"))
    mixture = Mixture(components={"a": config}, weights={"a": 1}, batch_size=2, is_training=True)
    with pytest.raises(KeyError) as caught:
        mixture.get_next()
    assert input_of(caught.value) == "Mixture"


@pytest.mark.parametrize(
    ("error", "problem"),
    [(OSError("Not a tar."), "damaged (Not a tar)"), (MemoryError(), "damaged (MemoryError)")],
)
def test_damaged_content_is_a_bad_record(error: Exception, problem: str, raises):
    expected = raises(BadRecordError, owner="a.tar", problem=problem)
    with expected, as_bad_record("a.tar", "damaged", OSError, MemoryError):
        raise error


@pytest.mark.parametrize(
    "error", [OSError(errno.EIO, "I/O error"), BadRecordError("no text"), KeyError("other")]
)
def test_failing_storage_bad_records_and_other_errors_stay_what_they_are(error: Exception):
    with pytest.raises(type(error)) as caught, as_bad_record("a", "damaged", OSError, ValueError):
        raise error
    assert caught.value is error
