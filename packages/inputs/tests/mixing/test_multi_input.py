from __future__ import annotations

import numpy as np
import pytest

from layerkit.config.nested_map import NestedMap
from layerkit.errors import ConfigError
from layerkit_inputs import BaseInput, LocalText, Prefetch, SyntheticInput
from layerkit_inputs.base.indexed_input import IndexedInput
from layerkit_inputs.mixing.multi_input import MultiInput
from layerkit_inputs.testing import laws
from layerkit_inputs.text.tokenizers import ByteTokenizer


class Rows(IndexedInput):
    """Rows `[2]` that hold their number twice."""

    num_rows: int = 24
    first: int = 0

    def _num_rows(self) -> int:
        return self.num_rows

    def _read_rows(self, rows: np.ndarray) -> NestedMap:
        return NestedMap(ids=np.stack([self.first + rows] * 2, axis=1).astype(np.int32))

    def ids_to_strings(self, ids, lengths, key=None):
        rows = zip(ids, lengths, strict=True)
        return [f"{self.first}{key or ''}:{row[:n].tolist()}" for row, n in rows]


class Endless(BaseInput):
    """Counts batches; its states are of scope `host`."""

    at = 0

    def _next(self) -> NestedMap:
        self.at += 1
        return NestedMap(ids=np.full((self.batch_size, 2), self.at, np.int32))

    def _reset(self) -> None:
        self.at = 0


def config(kind=Rows, **fields):
    return kind.HParams.config(**fields)


def four_and_six(**fields):
    inputs = {"web": config(batch_size=4), "books": config(batch_size=6, first=100)}
    return MultiInput(**{"is_training": True, "input_to_params": inputs, **fields})


def test_batches_of_4_and_6_have_an_outer_batch_of_2():
    inputs = {
        "web": config(batch_size=4, shuffle=False),
        "books": config(batch_size=6, first=100, shuffle=False),
    }
    source = four_and_six(input_to_params=inputs)
    assert source.batch_size == source.global_batch_size == 2
    batch = source.get_next()
    assert batch.web.ids[..., 0].tolist() == [[0, 1], [2, 3]]
    assert batch.books.ids[..., 0].tolist() == [[100, 101, 102], [103, 104, 105]]
    assert batch.web.ids.shape == (2, 2, 2) and batch.books.ids.shape == (2, 3, 2)
    assert source._components["web"].batch_size == 4


@pytest.mark.parametrize("mode", ["training", "epoch", "rolling"])
@pytest.mark.parametrize("reads_ahead", [False, True], ids=["plain", "prefetch"])
@pytest.mark.parametrize("law", laws.LAWS, ids=lambda law: law.__name__)
def test_several_inputs_obey_the_laws(law, reads_ahead, mode, check_law):
    passes = {"training": {"is_training": True}, "rolling": {"eval_loop_num_batches": 2}}
    inputs = {
        "a": config(percore_batch_size=2.0, num_rows=24),
        "b": config(percore_batch_size=3.0, num_rows=36),
        "c": config(num_rows=12),
    }
    fields = {"batch_size": 4, "percore_batch_size": 1.0, "input_to_params": inputs}
    fields |= passes.get(mode, {})
    check_law(law, lambda **more: MultiInput(**{**fields, **more}), reads_ahead=reads_ahead)


def test_state_scope_is_global_if_that_of_all_inputs_is():
    assert four_and_six().state_scope == "global"
    inputs = {"rows": config(batch_size=2), "endless": config(Endless, batch_size=2)}
    source = four_and_six(input_to_params=inputs)
    assert source.state_scope == "host"
    expected = [source.get_next() for _ in range(3)]
    source.peek()
    state = source.get_state()
    expected.append(source.get_next())
    fresh = four_and_six(input_to_params=inputs)
    fresh.set_state(state)
    laws.assert_same_batches([fresh.get_next()], expected[3:])


def test_epoch_ends_when_all_inputs_end():
    inputs = {"a": config(batch_size=4, num_rows=12), "b": config(batch_size=8, num_rows=17)}
    source = MultiInput(input_to_params=inputs)
    for _ in range(2):
        batches = list(source.eval_batches())
        assert [batch.b.provenance.max() for batch in batches] == [7, 15, 16]


def test_epochs_of_different_lengths_raise(raises):
    inputs = {"a": config(batch_size=4, num_rows=12), "b": config(batch_size=4, num_rows=13)}
    with raises(ConfigError, owner="MultiInput"):
        list(MultiInput(input_to_params=inputs).eval_batches())


def test_key_selects_the_input_that_decodes_texts(raises):
    ids, lengths = np.array([[1, 2], [3, 4]]), [1, 2]
    source = four_and_six()
    assert source.ids_to_strings(ids, lengths, "books") == ["100:[1]", "100:[3, 4]"]
    assert source.ids_to_strings(ids[None], [lengths], "web.src") == ["0src:[1]", "0src:[3, 4]"]
    with raises(ConfigError, field="key"):
        source.ids_to_strings(ids, lengths, "wab")
    with_default = four_and_six(default_input="web")
    assert with_default.ids_to_strings(ids, lengths) == ["0:[1]", "0:[3, 4]"]
    assert with_default.ids_to_strings(ids, lengths, "src") == ["0src:[1]", "0src:[3, 4]"]


def test_key_selects_the_input_of_the_tokenizer(tmp_path):
    for name in "ab":
        (tmp_path / name).write_text("text")
    text = LocalText.HParams.config(paths=[str(tmp_path)], batch_size=2)
    numbers = SyntheticInput.HParams.config(batch_size=2, num_examples=4)
    both = MultiInput(input_to_params={"text": text, "numbers": numbers})
    assert isinstance(both.text_tokenizer("text"), ByteTokenizer)
    assert both.text_tokenizer("numbers") is None and both.text_tokenizer() is None
    named = MultiInput(input_to_params={"text": text}, default_input="text")
    for source in (named, Prefetch(source=named)):
        assert isinstance(source.text_tokenizer(), ByteTokenizer)
