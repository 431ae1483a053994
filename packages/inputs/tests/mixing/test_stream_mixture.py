from __future__ import annotations

import numpy as np
import pytest

from layerkit.config.nested_map import NestedMap
from layerkit.errors import ConfigError
from layerkit_inputs.base.base_input import BaseInput
from layerkit_inputs.base.indexed_input import IndexedInput
from layerkit_inputs.mixing.stream_mixture import StreamMixture
from layerkit_inputs.testing import laws


class Stream(BaseInput):
    """An input without row numbers; host `h` of `n` has every `n`-th example from `h` on."""

    num_examples: int = 22
    first: int = 0
    at = 0

    def _next(self) -> NestedMap:
        start = self.at * self.global_batch_size
        if start >= self.num_examples:
            raise StopIteration
        self.at += 1
        rows = start + self.infeed_host_index + self.num_infeed_hosts * np.arange(self.batch_size)
        is_real = (rows < self.num_examples).astype(np.float32)
        rows = np.where(is_real > 0, rows, -1).astype(np.int32)
        return NestedMap(
            inner=NestedMap(ids=self.first + rows), provenance=rows, eval_sample_weights=is_real
        )

    def _reset(self) -> None:
        self.at = 0


class Rows(IndexedInput):
    """The same examples with row numbers."""

    num_examples: int = 22
    first: int = 0

    def _num_rows(self) -> int:
        return self.num_examples

    def _read_rows(self, rows: np.ndarray) -> NestedMap:
        return NestedMap(inner=NestedMap(ids=(self.first + rows).astype(np.int32)))


def components(kind, *sizes):
    return {
        name: kind.HParams.config(first=100 * number, num_examples=size)
        for number, (name, size) in enumerate(zip("abcdef", sizes, strict=False))
    }


def mixed(**fields):
    return StreamMixture(
        **{"batch_size": 4, "components": components(Stream, 8, 20), "is_training": True, **fields}
    )


def ids_of(batches):
    return [batch.inner.ids.tolist() for batch in batches]


@pytest.mark.parametrize(
    ("inner", "reads_ahead"),
    [("streams", False), ("rows", False), ("both", False), ("both", True)],
)
@pytest.mark.parametrize("mode", [{"is_training": True}, {"eval_loop_num_batches": 2}], ids=str)
@pytest.mark.parametrize("law", laws.LAWS, ids=lambda law: law.__name__)
def test_mixture_of_streams_obeys_the_laws(law, inner, reads_ahead, mode, check_law):
    of = components(Stream if inner == "streams" else Rows, 20, 9, 13)
    if inner == "both":
        of |= {"b": Stream.HParams.config(num_examples=16, first=100)}
        if "is_training" in mode:  # batches of Stream have provenance, also while training
            of["b"] = Rows.HParams.config(num_examples=7, first=100)
    fields = {"batch_size": 4, "components": of, "weights": {"a": 3, "b": 1, "c": 2}} | mode
    check_law(law, lambda **more: StreamMixture(**{**fields, **more}), reads_ahead=reads_ahead)


def test_stream_mixture_keeps_the_shares_and_the_order_of_rows():
    source = mixed(weights={"a": 1, "b": 3})
    ids = np.concatenate(ids_of(source.get_next() for _ in range(20)))
    for place in range(1, 81):
        assert abs(np.sum(ids[:place] >= 100) - 0.75 * place) < 1
    assert ids[ids < 100].tolist() == [n % 8 for n in range(20)]
    assert ids[ids >= 100].tolist() == [100 + n % 20 for n in range(60)]


def test_state_of_other_shares_or_components_raises(raises):
    state, turns = mixed().get_state(), {"turns": [["a", 1], ["b", 1]]}
    with raises(ConfigError, field="state.data", value=turns):
        mixed(weights={"a": 2, "b": 1}).set_state(state)
    with raises(ConfigError, field="state.data", value=turns):
        mixed(components=components(Stream, 4, 4, 4)).set_state(state)


class OtherRows(Stream):
    def _next(self):
        batch = super()._next()
        del batch.eval_sample_weights
        return batch


def test_stream_mixture_raises_if_rows_differ(raises):
    of = {**components(Stream, 8), "z": OtherRows.HParams.config()}
    with raises(ConfigError, owner="StreamMixture"):
        mixed(components=of).get_next()
