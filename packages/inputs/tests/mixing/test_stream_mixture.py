from __future__ import annotations

import numpy as np
import pytest

from layerkit.config.nested_map import NestedMap
from layerkit.errors import ConfigError
from layerkit_inputs.base.base_input import BaseInput
from layerkit_inputs.base.indexed_input import IndexedInput
from layerkit_inputs.mixing.stream_mixture import BatchMixture, StreamMixture
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

    @property
    def has_score_metrics(self) -> bool:
        return self.first == 100

    def score_metrics(self, scores):
        return {"total": sum(scores.values()), "examples": float(len(scores))}


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


def mixed(kind, **fields):
    return kind(
        **{"batch_size": 4, "components": components(Stream, 8, 20), "is_training": True, **fields}
    )


def ids_of(batches):
    return [batch.inner.ids.tolist() for batch in batches]


# Kind of mixture, kind of components, prefetched or not, and kind of pass.
CASES = [
    (kind, inner, reads_ahead, mode)
    for kind in (BatchMixture, StreamMixture)
    for inner in ("streams", "rows", "both")
    for reads_ahead in (False, True)
    for mode in ("training", "epoch", "rolling")
    if (kind, mode) != (StreamMixture, "epoch")  # a mixture of rows has no epoch
    and (inner == "both" or not reads_ahead)
]


@pytest.mark.parametrize(("kind", "inner", "reads_ahead", "mode"), CASES)
@pytest.mark.parametrize("law", laws.LAWS, ids=lambda law: law.__name__)
def test_mixtures_of_streams_obey_the_laws(law, kind, inner, reads_ahead, mode, check_law):
    passes = {"training": {"is_training": True}, "rolling": {"eval_loop_num_batches": 2}}
    of = components(Stream if inner == "streams" else Rows, 20, 9, 13)
    if inner == "both":
        of |= {"b": Stream.HParams.config(num_examples=16, first=100)}
        if mode == "training":  # batches of Stream have provenance, also while training
            of["b"] = Rows.HParams.config(num_examples=7, first=100)
    fields = {"batch_size": 4, "components": of, "weights": {"a": 3, "b": 1, "c": 2}}
    fields |= passes.get(mode, {})
    check_law(law, lambda **more: kind(**{**fields, **more}), reads_ahead=reads_ahead)


def test_batch_mixture_without_weights_is_round_robin():
    source = mixed(BatchMixture, components=components(Stream, 8, 8, 8))
    firsts = [ids[0] // 100 for ids in ids_of(source.get_next() for _ in range(6))]
    assert sorted(firsts[:3]) == [0, 1, 2] and firsts[3:] == firsts[:3]


def test_batch_mixture_keeps_the_shares_at_every_position():
    source = mixed(BatchMixture, weights={"a": 0.3, "b": 0.7})
    turns = [ids[0] // 100 for ids in ids_of(source.get_next() for _ in range(40))]
    assert source.shares() == {"a": 0.3, "b": 0.7}
    for place in range(1, 41):
        assert abs(sum(turns[:place]) - 0.7 * place) < 1


def test_stream_mixture_keeps_the_shares_and_the_order_of_rows():
    source = mixed(StreamMixture, weights={"a": 1, "b": 3})
    ids = np.concatenate(ids_of(source.get_next() for _ in range(20)))
    for place in range(1, 81):
        assert abs(np.sum(ids[:place] >= 100) - 0.75 * place) < 1
    assert ids[ids < 100].tolist() == [n % 8 for n in range(20)]
    assert ids[ids >= 100].tolist() == [100 + n % 20 for n in range(60)]


def test_batch_mixture_epoch_reads_each_component_to_its_end():
    source = mixed(BatchMixture, is_training=False, weights={"a": 5, "b": 1})
    for _ in range(2):
        batches = list(source.eval_batches())
        ids = np.concatenate(ids_of(batches))
        assert sorted(ids) == [*range(8), *range(100, 120)]
        component, number = np.concatenate([b.provenance for b in batches]) % 2, ids % 100
        np.testing.assert_array_equal(component, ids // 100)
        np.testing.assert_array_equal(np.concatenate([b.provenance for b in batches]) // 2, number)


def test_padding_keeps_its_provenance():
    source = mixed(BatchMixture, is_training=False, components=components(Stream, 3, 5))
    found = [batch.provenance.tolist() for batch in source.eval_batches()]
    assert found == [[0, 2, 4, -1], [1, 3, 5, 7], [9, -1, -1, -1]]


def test_batch_mixture_delegates_metrics_to_components():
    source = mixed(BatchMixture, is_training=False)
    assert source.has_score_metrics and not source.has_prediction_metrics
    scores = {0: 10.0, 2: 10.0, 1: 1.0, 3: 2.5}  # examples 0 and 1 of each
    assert source.score_metrics(scores) == {"b/total": 3.5, "b/examples": 2.0}
    assert source.prediction_metrics({0: "text"}) == {}


def test_hosts_read_the_same_component():
    hosts = [
        mixed(BatchMixture, batch_size=2, infeed_host_index=host, num_infeed_hosts=2)
        for host in (0, 1)
    ]
    for _ in range(10):
        first, second = (ids[0] for ids in ids_of(host.get_next() for host in hosts))
        assert first // 100 == second // 100 and first != second


def test_state_scope_is_global_if_that_of_all_components_is():
    assert mixed(BatchMixture).state_scope == "host"
    assert mixed(BatchMixture, components=components(Rows, 8, 20)).state_scope == "global"
    assert mixed(StreamMixture, components=components(Rows, 8, 20)).state_scope == "host"


@pytest.mark.parametrize("kind", [BatchMixture, StreamMixture])
def test_mixtures_reject_states_of_other_shares_or_components(raises, kind):
    state = mixed(kind).get_state()
    with raises(ConfigError, field="weights", value=[["a", 1], ["b", 1]]):
        mixed(kind, weights={"a": 2, "b": 1}).set_state(state)
    with raises(ConfigError, field="components", value=["a", "b"]):
        mixed(kind, components=components(Stream, 4, 4, 4)).set_state(state)


class OtherRows(Stream):
    def _next(self):
        batch = super()._next()
        del batch.eval_sample_weights
        return batch


def test_stream_mixture_raises_for_an_epoch(raises):
    with raises(ConfigError, owner="StreamMixture", field="eval_loop_num_batches", value=None):
        mixed(StreamMixture, is_training=False)


def test_stream_mixture_raises_if_rows_differ(raises):
    of = {**components(Stream, 8), "z": OtherRows.HParams.config()}
    with raises(ConfigError, owner="StreamMixture"):
        mixed(StreamMixture, components=of).get_next()


def test_batch_mixture_raises_if_a_component_has_no_data():
    with pytest.raises(ValueError):
        mixed(BatchMixture, components=components(Stream, 0, 4)).get_next()
