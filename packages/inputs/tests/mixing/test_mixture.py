from __future__ import annotations

import numpy as np
import pytest

from layerkit.config.nested_map import NestedMap
from layerkit.errors import ConfigError
from layerkit_inputs import BaseInput, LocalText, SyntheticInput
from layerkit_inputs.base.indexed_input import IndexedInput
from layerkit_inputs.grain.map_input import GrainMapInput
from layerkit_inputs.mixing.mixture import Mixture
from layerkit_inputs.packing.first_fit import plan_packing
from layerkit_inputs.packing.model_features import lm_features
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


def test_each_component_has_its_own_epochs():
    ids = ids_of(three(), 50)
    for first, num_rows in ((0, 50), (100, 7), (200, 3)):
        own = ids[ids // 100 == first // 100] - first
        assert len(own) > num_rows
        for start in range(0, len(own) - num_rows + 1, num_rows):
            assert sorted(own[start : start + num_rows]) == list(range(num_rows))


def test_components_of_one_length_have_different_orders():
    components = {"a": config(0, 30), "b": config(100, 30)}
    ids = ids_of(three(components=components, weights=None), 5)
    assert (ids[ids < 100]).tolist() != (ids[ids >= 100] - 100).tolist()
    again = three(components=components, weights=None, input_random_seed=1)
    assert ids_of(again, 5).tolist() != ids.tolist()
    # A component keeps its own seed.
    seeded = {"a": config(0, 30, input_random_seed=9), "b": config(100, 30, input_random_seed=9)}
    ids = ids_of(three(components=seeded, weights=None), 5)
    assert (ids[ids < 100]).tolist() == (ids[ids >= 100] - 100).tolist()


def packed_and_mixed(**fields):
    """Return a mixture of packed rows, windows and another mixture."""
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
    return Mixture(**{"batch_size": 4, "components": components, "weights": weights, **fields})


TRAINING, ROLLING = [{"is_training": True}, {"eval_loop_num_batches": 2}]


@pytest.mark.parametrize(
    ("mixture", "mode", "reads_ahead"),
    [
        (packed_and_mixed, TRAINING, False),
        (packed_and_mixed, TRAINING, True),
        (packed_and_mixed, ROLLING, False),
    ],
)
@pytest.mark.parametrize("law", laws.LAWS, ids=lambda law: law.__name__)
def test_mixture_obeys_the_laws_of_inputs(law, mixture, mode, reads_ahead, check_law):
    check_law(law, lambda **more: mixture(**{**mode, **more}), reads_ahead=reads_ahead)


def test_provenance_of_a_rolling_evaluation_identifies_each_row():
    source = three(is_training=False, eval_loop_num_batches=2)
    batches = list(source.eval_batches())
    for batch in batches:
        row, component = np.divmod(batch.provenance, 3)
        np.testing.assert_array_equal(batch.ids, component * 100 + row)
    assert len(batches) == 2 and batches[0].eval_sample_weights.tolist() == [1] * 8


def grain_rows(bad_row=None):
    """Return a config of random rows that differ by epoch, one of which may be unreadable."""
    import grain

    def augment(row, random):
        if row == bad_row:
            raise ValueError("bad")
        return NestedMap(x=np.float32(row + random.random()))

    rows = grain.MapDataset.range(4).random_map(augment, seed=5)
    return GrainMapInput.HParams.config(dataset=rows, shuffle=False, on_bad_record="skip")


def test_rows_of_a_component_differ_by_epoch_as_they_do_alone():
    pytest.importorskip("grain")
    fields = {"batch_size": 4, "is_training": True}
    alone = grain_rows().clone(**fields).Instantiate()
    mixed = Mixture(components={"a": grain_rows()}, **fields)
    nested = Mixture.HParams.config(components={"a": grain_rows()})
    nested = Mixture(components={"b": nested}, **fields)
    expected = laws.take(alone, 3)
    assert (expected[0].x != expected[1].x).all()
    for source in (mixed, nested):
        laws.assert_same_batches(laws.take(source, 3), expected)


def test_rows_that_cannot_be_read_are_padding_in_an_evaluation():
    pytest.importorskip("grain")
    source = Mixture(
        components={"a": grain_rows(bad_row=1), "b": grain_rows()},
        batch_size=8,
        eval_loop_num_batches=1,
    )
    batch = source.get_next()
    is_bad = batch.provenance < 0
    assert is_bad.sum() == 1 and source.num_skipped == 1
    np.testing.assert_array_equal(batch.eval_sample_weights, ~is_bad)
    assert sorted(batch.provenance[~is_bad]) == [0, 1, 3, 4, 5, 6, 7]
    np.testing.assert_array_equal(batch.x[~is_bad] // 1, batch.provenance[~is_bad] // 2)


def test_mixture_delegates_texts_and_units_to_its_components():
    source = three()
    assert source.shares() == {"a": 0.7, "b": 0.2, "c": 0.1}
    assert source.token_unit == "token"
    assert source.ids_to_strings(np.array([1, 2]), [1, 1]) == ["1", "2"]
    assert source.num_skipped == 0


class Changed(Numbers):
    def get_next(self):
        return super().get_next()


class Endless(BaseInput):
    """An input without row numbers."""


class OtherRows(Numbers):
    def _read_rows(self, rows):
        return NestedMap(ids=rows.astype(np.int64), weights=np.ones(len(rows)))


@pytest.mark.parametrize(
    ("fields", "field", "value"),
    [
        ({"is_training": False}, "eval_loop_num_batches", None),
        ({"shuffle": True}, "shuffle", True),
        ({"weights": {"a": 1, "d": 1}}, "weights", {"a": 1, "d": 1}),
        ({"components": {"a": Endless.HParams.config()}}, "components['a']", "Endless"),
        (
            {"components": {"a": config(0, 5, num_infeed_hosts=2)}},
            "components['a'].num_infeed_hosts",
            2,
        ),
        (
            {
                "components": {
                    "a": LocalText.HParams.config(),
                    "b": SyntheticInput.HParams.config(num_examples=3),
                }
            },
            "components['b'] token_unit",
            "token",
        ),
    ],
)
def test_mixture_raises_for_invalid_fields(raises, fields, field, value):
    with raises(ConfigError, owner="Mixture", field=field, value=value):
        three(**{"weights": None, **fields})


def test_mixture_raises_at_the_first_batch_if_rows_differ(raises):
    components = {"a": config(0, 5), "b": OtherRows.HParams.config()}
    source = three(components=components, weights={"a": 1000, "b": 1})
    with raises(ConfigError, owner="Mixture"):
        source.get_next()


def test_mixture_names_a_component_without_rows(raises):
    components = {"a": config(0, 5), "b": config(0, 0)}
    with raises(ConfigError, owner="Numbers 'b'"):
        three(components=components, weights=None).get_next()


@pytest.mark.parametrize(
    "fields",
    [
        {"components": {"b": config(100, 7), "a": config(0, 50), "c": config(200, 3)}},
        {"weights": None},
        {"components": {"a": config(0, 50), "b": config(100, 8), "c": config(200, 3)}},
    ],
    ids=["order", "weights", "rows"],
)
def test_mixture_rejects_a_state_of_other_data(raises, fields):
    state = three().get_state()
    with raises(ConfigError):
        three(**fields).set_state(state)
