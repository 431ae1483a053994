from __future__ import annotations

import itertools
import re
from pathlib import Path

import numpy as np
import pytest

import layerkit_inputs
from layerkit.config.nested_map import NestedMap
from layerkit_inputs import (
    BaseInput,
    ImageInput,
    IndexedInput,
    LocalText,
    LocalTextPrompts,
    Prefetch,
    SpeechInput,
    SyntheticInput,
)
from layerkit_inputs.testing import laws

TRAINING = {"is_training": True}
EPOCH: dict = {}
ROLLING = {"eval_loop_num_batches": 2}


class Changed(SyntheticInput):
    """An input that overrides `get_next`."""

    def get_next(self):
        batch = super().get_next()
        batch.inner = NestedMap(doubled=batch.ids * 2)
        return batch


class Strided(BaseInput):
    """A minimal input with `_next` and `_reset`, whose hosts have different rows."""

    num_rows: int = 22
    at = 0

    def _next(self) -> NestedMap:
        start = self.at * self.global_batch_size
        if start >= self.num_rows:
            raise StopIteration
        self.at += 1
        rows = start + self.infeed_host_index + self.num_infeed_hosts * np.arange(self.batch_size)
        rows = np.where(rows < self.num_rows, rows, -1).astype(np.int32)
        return NestedMap(provenance=rows, weights=(rows >= 0).astype(np.float32))

    def _reset(self) -> None:
        self.at = 0


class WhollyOwn(BaseInput):
    """An input that overrides `get_next` and `reset`, as in Pax, and ends after three batches."""

    at = 0

    def get_next(self):
        if self.at == 3:
            raise StopIteration
        self.at += 1
        return NestedMap(ids=np.full(self.batch_size, self.at))

    def reset(self):
        self.at = 0


@pytest.fixture(scope="module")
def text_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    for number in range(30):
        (folder / f"{number:02}.txt").write_bytes(b"line %d\n" % number * (3 * number))
    return str(folder)


def text_fields(text_folder):
    return {"batch_size": 8, "paths": [text_folder], "heldout_fraction": 0.4}


SYNTHETIC = {"vocab_size": 50, "seq_length": 6}
# A reader joins here by a line: its class, and the fields that make a batch of 8 or 12 rows.
READERS = {
    LocalText: lambda folder: {**text_fields(folder), "seq_length": 64},
    LocalTextPrompts: lambda folder: {**text_fields(folder), "prompt_length": 7},
    SyntheticInput: lambda _: {"batch_size": 12, **SYNTHETIC, "num_examples": 29},
    Changed: lambda _: {"batch_size": 8, **SYNTHETIC, "num_examples": 21},
    Strided: lambda _: {"batch_size": 8},
    WhollyOwn: lambda _: {"batch_size": 8},
}


@pytest.mark.parametrize("reads_ahead", [False, True], ids=["plain", "prefetch"])
@pytest.mark.parametrize("mode", [TRAINING, EPOCH, ROLLING], ids=["training", "epoch", "rolling"])
@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.__name__)
@pytest.mark.parametrize("law", laws.LAWS, ids=lambda law: law.__name__)
def test_input_obeys_the_laws_of_inputs(law, reader, mode, reads_ahead, text_folder, check_law):
    fields = {**READERS[reader](text_folder), **mode}
    check_law(law, lambda **more: reader(**{**fields, **more}), reads_ahead=reads_ahead)


def test_every_input_of_the_package_is_tested_by_the_laws():
    # By name, since some readers need an extra.
    files = Path(__file__).parents[1].rglob("test_*.py")
    texts = [path.read_text() for path in files if path != Path(__file__)]
    under_laws = "\n".join(text for text in texts if "laws.LAWS" in text)
    public = (getattr(layerkit_inputs, name) for name in layerkit_inputs.__all__)
    readers = {cls for cls in public if isinstance(cls, type) and issubclass(cls, BaseInput)}
    # Prefetch is run around each of the others.
    for reader in readers - {BaseInput, ImageInput, IndexedInput, SpeechInput, Prefetch, *READERS}:
        assert re.search(rf"\b{reader.__name__}\b", under_laws), f"{reader.__name__}: no laws"


def test_rolling_evaluation_with_padding_obeys_the_laws(text_folder):
    fields = {**text_fields(text_folder), **ROLLING, "batch_padding_size": 3}
    laws.evaluations_follow_the_fields(lambda **more: LocalText(**{**fields, **more}))


def test_every_law_is_in_the_list():
    public = {
        name
        for name, value in vars(laws).items()
        if getattr(value, "__module__", "") == laws.__name__
        and not name.startswith("_")
        and getattr(value, "__annotations__", {}).get("make") == "Make"
    }
    assert public == {law.__name__ for law in laws.LAWS}


class ForgetsItsPosition(Strided):
    def _set_reader_state(self, position):
        self._reset()


class NeverTheSame(Strided):
    numbers = itertools.count()

    def _next(self):
        batch = super()._next()
        batch.weights = batch.weights + next(self.numbers)
        return batch


class GivesAwayItsOwnArray(Strided):
    def __post_init__(self):
        super().__post_init__()
        self.kept = np.ones(self.batch_size, np.float32)

    def _next(self):
        batch = super()._next()
        batch.kept = self.kept
        return batch


class EndsShort(Strided):
    def _next(self):
        batch = super()._next()
        return batch.transform(lambda array: array[batch.weights > 0])


class EndsOnce(Strided):
    def _next(self):
        try:
            return super()._next()
        except StopIteration:
            self.at = 0
            raise


class SharesRows(Strided):
    def _next(self):
        batch = super()._next()
        batch.provenance = np.arange(self.batch_size, dtype=np.int32)
        return batch


class EndsApart(Strided):
    def _next(self):
        if self.at == 1 and self.infeed_host_index:
            raise StopIteration
        return super()._next()


class ClaimsToBeGlobal(Strided):
    state_scope = "global"


class Unresettable(Strided):
    def _reset(self):
        self.at = min(self.at, 1)


class TellsItsOwnPlace(Strided):
    """An invalid input of scope `global` whose state depends on the host."""

    state_scope = "global"

    def _reader_state(self):
        return {"num_delivered": self._num_delivered, "host": self.infeed_host_index}


class TakesAnyState(Strided):
    def _set_envelope(self, envelope):
        self._set_reader_state(envelope["position"])


class CannotClose(Strided):
    def close(self):
        pass


@pytest.mark.parametrize(
    ("reader", "law"),
    [
        (EndsShort, laws.batches_have_their_size),
        (NeverTheSame, laws.making_it_again_repeats_it),
        (ForgetsItsPosition, laws.every_state_resumes),
        (Unresettable, laws.reset_starts_over),
        (GivesAwayItsOwnArray, laws.batches_belong_to_the_caller),
        (EndsOnce, laws.the_end_is_kept),
        (NeverTheSame, laws.evaluations_follow_the_fields),
        (SharesRows, laws.hosts_share_the_stream),
        (EndsApart, laws.hosts_share_the_stream),
        (ClaimsToBeGlobal, laws.hosts_share_the_stream),
        (ClaimsToBeGlobal, laws.any_number_of_hosts_resumes_any_state),
        (TellsItsOwnPlace, laws.any_number_of_hosts_resumes_any_state),
        (TakesAnyState, laws.states_of_hosts_stay_with_them),
        (CannotClose, laws.closing_ends_it),
    ],
    ids=lambda value: value.__name__,
)
def test_law_fails_for_an_input_that_breaks_it(reader, law):
    with pytest.raises((AssertionError, ValueError)):
        law(lambda **more: reader(**{"batch_size": 8, **more}))
