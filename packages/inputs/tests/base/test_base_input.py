"""BaseInput: the table of evaluation, states, peeking, and inputs written in few lines."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from layerkit.config.nested_map import NestedMap
from layerkit.errors import ConfigError
from layerkit_inputs.base.base_input import BaseInput

PASSES = "reset_for_eval and repeat"


class Counting(BaseInput):
    """`num_rows` rows that hold their number; this host's are those congruent to its index."""

    num_rows: int = 13

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at = 0

    def _next(self) -> NestedMap:
        own = np.arange(self.infeed_host_index, self.num_rows, self.num_infeed_hosts)
        here = own[self._at : self._at + self.batch_size]
        if not len(here):
            raise StopIteration
        self._at += len(here)
        missing = self.batch_size - len(here)
        return NestedMap(
            ids=np.pad(here, (0, missing)).astype(np.int32),
            weights=np.pad(np.ones(len(here), np.float32), (0, missing)),
        )

    def _reset(self) -> None:
        self._at = 0


class WithNewField(Counting):
    """Changes batches as Pax's users write it; counts how often its body ran."""

    calls = 0

    def get_next(self):
        batch = super().get_next()
        batch.new_field = batch.ids * 10
        batch.ids = batch.ids + 1
        self.calls += 1
        return batch


class TwoInOne(Counting):
    """Makes a batch of two of its parent's."""

    def get_next(self):
        parts = [super().get_next(), super().get_next()]
        return NestedMap({key: np.concatenate([p[key] for p in parts]) for key in parts[0]})


class WhollyOwn(BaseInput):
    """Overrides `get_next` and `reset` as the interface of Pax has them, and nothing else."""

    at = 0

    def get_next(self):
        if self.at == 5:
            raise StopIteration
        self.at += 1
        return NestedMap(ids=np.full(self.batch_size, self.at))

    def reset(self):
        self.at = 0


def ids_of(batches) -> list[list[int]]:
    return [batch.ids.tolist() for batch in batches]


def drain(source: BaseInput) -> list[NestedMap]:
    batches = []
    while True:
        try:
            batches.append(source.get_next())
        except StopIteration:
            return batches


def test_by_default_each_evaluation_is_one_epoch():
    source = Counting(batch_size=2)
    assert (source.reset_for_eval, source.repeat, source.endless) == (True, False, False)
    assert source.evaluates == "epoch"
    first = list(source.eval_batches())
    assert len(first) == 7
    assert sum(batch.weights.sum() for batch in first) == 13
    assert first[-1].weights.tolist() == [1, 0]
    for _ in range(2):
        assert ids_of(source.eval_batches()) == ids_of(first)
        source.reset()
        source.get_next()
        source.peek()


def test_reset_evaluations_read_the_same_first_batches_each_time():
    source = Counting(batch_size=2, reset_for_eval=True, eval_loop_num_batches=3)
    assert not source.endless
    for _ in range(2):
        assert ids_of(source.eval_batches()) == [[0, 1], [2, 3], [4, 5]]
    longer = Counting(batch_size=2, num_rows=4, reset_for_eval=True, eval_loop_num_batches=3)
    assert ids_of(longer.eval_batches()) == [[0, 1], [2, 3]]


@pytest.mark.parametrize("fields", [{"repeat": True}, {"reset_for_eval": False}, {}])
def test_rolling_evaluations_take_the_next_batches_of_an_endless_stream(fields):
    source = Counting(batch_size=2, num_rows=6, eval_loop_num_batches=2, **fields)
    assert source.endless and source.evaluates == "next"
    assert ids_of(source.eval_batches()) == [[0, 1], [2, 3]]
    assert ids_of(source.eval_batches()) == [[4, 5], [0, 1]]


def test_training_is_endless():
    source = Counting(batch_size=1, num_rows=10, is_training=True)
    assert [source.get_next().ids[0] for _ in range(25)] == [i % 10 for i in range(25)]
    assert (source.reset_for_eval, source.repeat) == (False, True)


@pytest.mark.parametrize(
    ("fields", "field", "value"),
    [
        ({"batch_size": None}, "batch_size", None),
        ({"batch_size": 0}, "batch_size", 0),
        ({"infeed_host_index": 2, "num_infeed_hosts": 2}, "infeed_host_index", 2),
        ({"eval_loop_num_batches": 0}, "eval_loop_num_batches", 0),
        ({"batch_padding_size": -1}, "batch_padding_size", -1),
        ({"reset_for_eval": True, "repeat": True}, PASSES, [True, True]),
        ({"reset_for_eval": False, "repeat": False}, PASSES, [False, False]),
        ({"repeat": True}, "eval_loop_num_batches", None),
        ({"is_training": True, "reset_for_eval": True}, PASSES, [True, None]),
    ],
    ids=str,
)
def test_wrong_fields_raise_when_built(raises, fields, field, value):
    config = Counting.HParams.config(**{"name": "dev", "batch_size": 2, **fields})
    with raises(ConfigError, owner="Counting 'dev'", field=field, value=value):
        config.Instantiate()


def test_evaluation_of_an_endless_stream_continues_past_the_end():
    source = WhollyOwn(batch_size=1, repeat=True, eval_loop_num_batches=7)
    assert ids_of(source.eval_batches()) == [[1], [2], [3], [4], [5], [1], [2]]
    assert ids_of(source.eval_batches())[0] == [3]


class Empty(WhollyOwn):
    def get_next(self):
        raise StopIteration


@pytest.mark.parametrize("source", [Empty, functools.partial(Counting, num_rows=0)])
def test_endless_input_without_data_raises(raises, source):
    with raises(ConfigError):
        source(batch_size=1, is_training=True).get_next()


def test_state_of_another_reader_raises_with_the_input_as_owner(raises):
    source = WithNewField(batch_size=2, name="dev")
    with raises(
        ConfigError, owner="WithNewField 'dev'", field="state", value={"reader": "Counting"}
    ):
        source.set_state(Counting(batch_size=2).get_state())


@pytest.mark.parametrize("state", [None, 3, {}, {"reader": "Counting"}], ids=str)
def test_values_that_are_no_state_raise(raises, state):
    with raises(ConfigError, owner="Counting", field="state"):
        Counting(batch_size=2).set_state(state)


def test_a_changed_batch_is_peeked_as_it_will_come_and_changed_once():
    source = WithNewField(batch_size=2)
    peeked = source.peek()
    assert peeked.new_field.tolist() == [0, 10] and peeked.ids.tolist() == [1, 2]
    peeked.scribble = np.zeros(2)
    state = source.get_state()
    batch = source.get_next()
    assert batch.ids.tolist() == [1, 2] and sorted(batch) == ["ids", "new_field", "weights"]
    assert source.calls == 1
    assert source.get_next().new_field.tolist() == [20, 30]
    source.set_state(state)
    assert source.get_next().new_field.tolist() == [0, 10]


def test_one_delivery_may_use_up_several_batches_of_the_parent():
    source = TwoInOne(batch_size=2, num_rows=8)
    assert source.peek().ids.tolist() == [0, 1, 2, 3]
    assert ids_of(drain(source)) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_an_input_with_get_next_alone_counts_its_batches():
    source = WhollyOwn(batch_size=1)
    source.get_next()
    source.peek()
    assert source.get_state() == {
        "reader": "WhollyOwn",
        "scope": "host",
        "position": {"num_delivered": 1},
        "host": [0, 1],
    }
    source.reset()
    assert source.get_state()["position"] == {"num_delivered": 0}


def test_a_failing_read_leaves_the_input_usable():
    class Flaky(Counting):
        failures = 1

        def get_next(self):
            if self.failures:
                self.failures -= 1
                raise OSError("the disk is away")
            return super().get_next()

    source = Flaky(batch_size=2)
    with pytest.raises(OSError, match="the disk is away"):
        source.peek()
    assert source.get_next().ids.tolist() == [0, 1]


def test_only_epochs_that_no_index_plans_ask_the_other_hosts():
    asked = []

    def all_gather(value):
        """The other host has a batch more."""
        asked.append(value)
        other = {"ids": [[2], "int32"], "weights": [[2], "float32"]}
        return [value, other if len(asked) <= 3 else None]

    source = Counting(batch_size=2, num_rows=4)
    spec = source.peek()
    batches = list(source.eval_batches(all_gather))
    assert len(batches) == 3 and batches[-1].ids.tolist() == batches[-1].weights.tolist() == [0, 0]
    assert batches[-1].ids.dtype == spec.ids.dtype and asked[-1] is None

    def never(value):
        raise AssertionError("asked")

    rolling = Counting(batch_size=2, num_rows=4, eval_loop_num_batches=3)
    assert len(list(rolling.eval_batches(never))) == 3

    class Planned(Counting):
        """As readers that plan their shares from one index."""

        state_scope = "global"

    assert len(list(Planned(batch_size=2, num_rows=4).eval_batches(never))) == 2


@pytest.mark.parametrize("method", ["_next", "get_next"])
def test_end_of_a_tensorflow_iterator_ends_the_data(method: str):
    tf = pytest.importorskip("tensorflow")

    def read(self) -> NestedMap:
        return NestedMap(ids=self.rows.get_next().numpy())

    def restart(self) -> None:
        self.rows = iter(tf.data.Dataset.range(3).batch(1))

    Reader = type("Reader", (Counting,), {method: read, "_reset": restart})  # noqa: N806
    source = Reader(batch_size=1)
    # Pax's readers end in the same way, whether they are evaluated or trained on.
    assert ids_of(source.eval_batches()) == ids_of(source.eval_batches()) == [[0], [1], [2]]
    endless = Reader(batch_size=1, is_training=True)
    endless.reset()
    assert [endless.get_next().ids.tolist() for _ in range(5)] == [[0], [1], [2], [0], [1]]
