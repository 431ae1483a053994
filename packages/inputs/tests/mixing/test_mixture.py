"""Mixture: shares, epochs and states of rows from several readers, on any number of hosts."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from layerkit.nested_map import NestedMap
from layerkit_inputs import LocalText, Prefetch, SyntheticInput
from layerkit_inputs.features import lm_features
from layerkit_inputs.indexed_input import IndexedInput
from layerkit_inputs.mixing.mixture import Mixture
from layerkit_inputs.packing import plan_packing
from layerkit_inputs.testing import laws


class Numbers(IndexedInput):
    """Rows that hold `first` and their number."""

    num_rows: int = 5
    first: int = 0

    def _num_rows(self) -> int:
        return self.num_rows

    def _read_rows(self, rows: np.ndarray) -> NestedMap:
        return NestedMap(ids=(self.first + rows).astype(np.int32))

    def ids_to_strings(self, ids, lengths, key=None):
        return [str(i) for i in ids]


class PackedDocuments(IndexedInput):
    """Documents of made-up lengths, whole, in rows by first fit."""

    num_documents: int = 40
    first_token: int = 100
    length: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        self._sizes = [1 + (7 * number) % 13 for number in range(self.num_documents)]
        self._plan = plan_packing(self._sizes, self.length)

    def _num_rows(self) -> int:
        return self._plan.num_rows

    def _read_rows(self, rows: np.ndarray) -> NestedMap:
        documents = [self._plan.documents_of(row) for row in rows]
        numbers = np.concatenate(documents)
        tokens = [self.first_token + np.arange(self._sizes[number]) + number for number in numbers]
        ends = np.cumsum([len(row) for row in documents])
        starts = np.concatenate([[0], ends[:-1]])
        segments = [range(start, end) for start, end in zip(starts, ends, strict=True)]
        return lm_features(None, tokens, length=self.length, rows=segments)


class InMemory(PackedDocuments):
    rows_in_memory = True


def config(first, num_rows, **fields):
    return Numbers.HParams.config(first=first, num_rows=num_rows, **fields)


def three(**fields):
    components = {"a": config(0, 50), "b": config(100, 7), "c": config(200, 3)}
    return Mixture(
        **{
            "batch_size": 8,
            "is_training": True,
            "components": components,
            "weights": {"a": 0.7, "b": 0.2, "c": 0.1},
            **fields,
        }
    )


def ids_of(source, num_batches):
    return np.concatenate([source.get_next().ids for _ in range(num_batches)])


def test_every_prefix_has_the_shares_within_one_row():
    ids = ids_of(three(), 50)
    for place in range(1, len(ids) + 1):
        counts = np.bincount(ids[:place] // 100, minlength=3)
        assert np.abs(counts - place * np.array([0.7, 0.2, 0.1])).max() < 1


def test_each_component_runs_through_epochs_of_its_own():
    ids = ids_of(three(), 50)
    for first, num_rows in ((0, 50), (100, 7), (200, 3)):
        own = ids[ids // 100 == first // 100] - first
        assert len(own) > num_rows
        for start in range(0, len(own) - num_rows + 1, num_rows):
            assert sorted(own[start : start + num_rows]) == list(range(num_rows))


def test_components_of_one_length_are_not_shuffled_alike():
    components = {"a": config(0, 30), "b": config(100, 30)}
    ids = ids_of(three(components=components, weights=None), 5)
    assert (ids[ids < 100]).tolist() != (ids[ids >= 100] - 100).tolist()
    again = three(components=components, weights=None, input_random_seed=1)
    assert ids_of(again, 5).tolist() != ids.tolist()
    # A seed of its own is kept.
    seeded = {"a": config(0, 30, input_random_seed=9), "b": config(100, 30, input_random_seed=9)}
    ids = ids_of(three(components=seeded, weights=None), 5)
    assert (ids[ids < 100]).tolist() == (ids[ids >= 100] - 100).tolist()


def packed_and_mixed(**fields):
    """Packed rows of two data sets and single rows of a third; shuffled."""
    components = {
        "long": PackedDocuments.HParams.config(num_documents=50),
        "short": PackedDocuments.HParams.config(num_documents=11, first_token=1000),
        "windows": PackedDocuments.HParams.config(
            num_documents=25, first_token=2000, shuffle_window=4
        ),
        "mixed": Mixture.HParams.config(
            components={
                "x": PackedDocuments.HParams.config(num_documents=20, first_token=3000),
                "y": PackedDocuments.HParams.config(num_documents=30, first_token=4000),
            }
        ),
    }
    weights = {"long": 5, "short": 1.5, "windows": 2, "mixed": 1.5}
    return Mixture(**{"is_training": True, "components": components, "weights": weights, **fields})


def test_a_run_goes_on_mid_epoch_with_1_2_4_8_and_3_hosts():
    whole = packed_and_mixed(batch_size=24)
    expected = [whole.get_next() for _ in range(10)]
    state, found = None, []
    for num_hosts in (1, 2, 4, 8, 3):
        hosts = [
            packed_and_mixed(
                batch_size=24 // num_hosts, infeed_host_index=host, num_infeed_hosts=num_hosts
            )
            for host in range(num_hosts)
        ]
        for host in hosts:
            if state is not None:
                host.set_state(json.loads(state))
        for _ in range(2):
            parts = [host.get_next() for host in hosts]
            found.append(
                NestedMap({key: np.concatenate([p[key] for p in parts]) for key in parts[0]})
            )
        states = {json.dumps(host.get_state()) for host in hosts}
        assert len(states) == 1
        state = states.pop()
    laws.assert_same_batches(found, expected)
    assert len(state) < 2000
    assert (found[-1].segment_ids.max(axis=1) > 1).any()


@pytest.mark.parametrize(
    ("mode", "reads_ahead"),
    [
        ({"is_training": True}, False),
        ({"is_training": True}, True),
        ({"eval_loop_num_batches": 2}, False),
    ],
)
@pytest.mark.parametrize("law", laws.LAWS, ids=lambda law: law.__name__)
def test_mixtures_obey_the_laws(law, reads_ahead, mode):
    made = []

    def make(**more):
        source = packed_and_mixed(**{"batch_size": 4, "is_training": False, **mode, **more})
        made.append(Prefetch(source=source) if reads_ahead else source)
        return made[-1]

    law(make)
    for source in made:
        source.close()


def two_in_memory(kind=InMemory, **fields):
    """The second has a row less often than every batch."""
    components = {
        "many": kind.HParams.config(num_documents=50),
        "few": kind.HParams.config(num_documents=11, first_token=1000),
    }
    given = {"batch_size": 4, "weights": {"many": 9, "few": 1}, **fields}
    return Mixture(components=components, **given)


MODES = [{"is_training": True}, {"eval_loop_num_batches": 2}]


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("law", laws.LAWS, ids=lambda law: law.__name__)
def test_mixtures_of_rows_in_memory_obey_the_laws(law, mode):
    law(lambda **more: two_in_memory(**{**mode, **more}))


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("num_hosts", [1, 3])
def test_batches_are_the_same_whether_read_at_once_or_each_by_itself(mode, num_hosts):
    for host in range(num_hosts):
        fields = {"infeed_host_index": host, "num_infeed_hosts": num_hosts, **mode}
        expected = laws.take(two_in_memory(PackedDocuments, **fields), 11)
        source = two_in_memory(**fields)
        laws.assert_same_batches(laws.take(source, 6), expected[:6])
        state = source.get_state()
        laws.assert_same_batches(laws.take(source, 5), expected[6:])
        source.set_state(state)
        laws.assert_same_batches(laws.take(source, 5), expected[6:])


def test_a_rolling_evaluation_names_each_row():
    source = three(is_training=False, eval_loop_num_batches=2)
    batches = list(source.eval_batches())
    for batch in batches:
        row, component = np.divmod(batch.provenance, 3)
        np.testing.assert_array_equal(batch.ids, component * 100 + row)
    assert len(batches) == 2 and batches[0].eval_sample_weights.tolist() == [1] * 8


def test_shares_units_and_texts_are_those_of_the_components():
    source = three()
    assert source.shares() == {"a": 0.7, "b": 0.2, "c": 0.1}
    assert source.token_unit == "token"
    assert source.ids_to_strings(np.array([1, 2]), [1, 1]) == ["1", "2"]
    assert source.num_skipped == 0


class Changed(Numbers):
    def get_next(self):
        return super().get_next()


class OtherRows(Numbers):
    def _read_rows(self, rows):
        return NestedMap(ids=rows.astype(np.int64), weights=np.ones(len(rows)))


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (
            {"is_training": False},
            "one epoch of a mixture is not defined; set eval_loop_num_batches, or evaluate on "
            "each component by itself.",
        ),
        (
            {"shuffle": True},
            "shuffle=True; a mixture keeps the order of its turns, set shuffle on its components.",
        ),
        (
            {"components": {}},
            "components={}; expected a dict of name -> config of an input.",
        ),
        (
            {"weights": {"a": 1, "b": 1, "d": 1}},
            "weights['d'] is of no component.",
        ),
        (
            {"components": {"a": Changed.HParams.config()}, "weights": None},
            "components['a']: Changed overrides get_next, but a mixture reads single rows and "
            "would not call it; override _read_rows, or use StreamMixture.",
        ),
        (
            {"components": {"a": config(0, 5, num_infeed_hosts=2)}, "weights": None},
            "components['a'] sets num_infeed_hosts=2, but num_infeed_hosts=1 here; leave it unset "
            "there, since a component follows the input that it is part of.",
        ),
        (
            {
                "components": {
                    "a": LocalText.HParams.config(),
                    "b": SyntheticInput.HParams.config(num_examples=3),
                },
                "weights": None,
            },
            "components['a'] and components['b'] have unlike vocabularies: tokens of a 'byte' and "
            "'token'; a model reads one.",
        ),
    ],
)
def test_what_cannot_be_mixed_is_refused_when_built(fields, text):
    with pytest.raises(ValueError, match=f"^{re.escape('Mixture: ' + text)}$"):
        three(**fields)


def test_a_built_input_is_no_component():
    with pytest.raises(ValueError, match=r"^Mixture: components\['a'\] is Numbers\(.*expected the"):
        three(components={"a": Numbers(batch_size=2)}, weights=None)


def test_unlike_rows_are_refused_at_the_first_batch():
    components = {"a": config(0, 5), "b": OtherRows.HParams.config()}
    source = three(components=components, weights={"a": 1000, "b": 1})
    whole = (
        "Mixture: components['a'] and components['b'] make unlike rows: ids: int32[] and int64[]; "
        "weights: missing and float64[]."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(whole)}$"):
        source.get_next()


def test_a_component_without_rows_is_named():
    components = {"a": config(0, 5), "b": config(0, 0)}
    with pytest.raises(ValueError, match=r"^Numbers 'b': there are no rows to read\.$"):
        three(components=components, weights=None).get_next()


def test_a_state_of_other_shares_or_data_is_refused():
    state = three().get_state()
    components = {"b": config(100, 7), "a": config(0, 50), "c": config(200, 3)}
    with pytest.raises(ValueError, match=r"and is \[\['b', 2\], \['a', 7\], \['c', 1\]\]"):
        three(components=components).set_state(state)
    with pytest.raises(
        ValueError, match=r"turns was \[\['a', 7\], \['b', 2\], .* and is \[\['a', 1"
    ):
        three(weights=None).set_state(state)
    components = {"a": config(0, 50), "b": config(100, 8), "c": config(200, 3)}
    with pytest.raises(ValueError, match=r"this data: b\.num_rows was 7 and is 8\. Restore"):
        three(components=components).set_state(state)
