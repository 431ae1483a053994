"""StagedRows against the rows of its source, and cut rows against rows packed at that length."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from layerkit.config.nested_map import NestedMap
from layerkit.errors import ConfigError
from layerkit_inputs import LocalText, Mixture
from layerkit_inputs.base.indexed_input import IndexedInput
from layerkit_inputs.mixing.staged_rows import StagedRows, StageRows, cut_rows, token_ranges

LENGTH = 16


class Tokens(IndexedInput):
    """Rows of `LENGTH` tokens, each of which occurs once in an epoch."""

    num_rows: int = 40
    first: int = 0

    def _num_rows(self) -> int:
        return self.num_rows

    def _read_rows(self, rows: np.ndarray) -> NestedMap:
        return NestedMap(ids=self.first + rows[:, None] * LENGTH + np.arange(LENGTH))


# A batch ramp, growth to two longer lengths, of which the second leaves out a part of a row, a
# shorter length, and more than one epoch of the 40 rows.
STAGES = (
    StageRows(3, 4, 4),
    StageRows(2, 8, 4),
    StageRows(2, 6, 8),
    StageRows(3, 4, 16),
    StageRows(20, 8, 8),
)
NUM_STEPS = sum(stage.num_steps for stage in STAGES)


def staged(source=None, *, stages=STAGES, hosts=1, host=0, **fields) -> StagedRows:
    source = Tokens.HParams.config() if source is None else source
    fields |= {"batch_size": stages[0].batch // hosts, "is_training": True, "name": "train"}
    fields |= {"num_infeed_hosts": hosts, "infeed_host_index": host}
    return StagedRows(source=source, stages=stages, **{"row_length": LENGTH, **fields})


def alone(config, num_rows: int) -> np.ndarray:
    """Tokens of the first rows of a source that is read by itself, [tokens]."""
    source = config.clone(is_training=True, batch_size=1, input_random_seed=0).Instantiate()
    return np.concatenate([source.get_next().ids[0] for _ in range(num_rows)])


def take(sources: list[StagedRows], count: int) -> list[np.ndarray]:
    """The ids of the next global batches of all hosts."""
    return [np.concatenate([one.get_next().ids for one in sources]) for _ in range(count)]


def test_stages_read_the_tokens_of_the_source_once_and_in_order():
    batches = take([staged()], NUM_STEPS)
    sizes = [(stage.batch, stage.length) for stage in STAGES for _ in range(stage.num_steps)]
    assert [batch.shape for batch in batches] == sizes
    # 3·4·4 + 2·8·4 = 112 tokens are whole rows of 8, and 112 + 2·6·8 = 208 whole rows of 16.
    begins = [tokens.start for tokens in token_ranges(STAGES)]
    assert begins == [0, 48, 112, 208, 400]
    tokens = np.concatenate([batch.ravel() for batch in batches])
    np.testing.assert_array_equal(tokens, alone(Tokens.HParams.config(), 200)[: len(tokens)])
    assert len(tokens) > 2 * 40 * LENGTH  # more than two epochs


def test_a_longer_row_begins_whole_and_the_rest_before_it_is_counted():
    stages = (StageRows(3, 1, 4), StageRows(1, 2, 8), StageRows(2, 1, 16))
    # 12 tokens, 4 left out, 16 of [16, 32), then rows from 32 on.
    assert token_ranges(stages) == [range(12), range(16, 32), range(32, 64)]
    tokens = np.concatenate([batch.ravel() for batch in take([staged(stages=stages)], 6)])
    whole = alone(Tokens.HParams.config(), 4)
    np.testing.assert_array_equal(tokens, np.delete(whole, range(12, 16)))


MIXED = (
    StageRows(5, 4, 8, {"web": 1, "code": 1, "anneal": 0}),
    StageRows(4, 6, 16),
    StageRows(6, 4, 16, {"web": 1, "anneal": 3}),
    StageRows(4, 4, 16, {"code": 1}),
)


def mixture() -> object:
    parts = {"web": (30, 0), "code": (17, 10_000), "anneal": (9, 20_000)}
    components = {
        name: Tokens.HParams.config(num_rows=rows, first=first, input_random_seed=7)
        for name, (rows, first) in parts.items()
    }
    return Mixture.HParams.config(components=components)


@pytest.mark.parametrize("hosts", [1, 2, 4])
@pytest.mark.parametrize("new_hosts", [1, 2])
def test_every_state_resumes_on_another_number_of_hosts(hosts: int, new_hosts: int):
    """The batch, the length and the mixture change, the last one linearly."""
    weights = [{"web": 1}, None, {"code": 1}, None, {"code": [1, 0], "anneal": [0, 1]}]
    pairs = enumerate(zip(STAGES, weights, strict=True))
    stages = [s._replace(batch=4 * (1 + n % 2), weights=w) for n, (s, w) in pairs]
    expected = take([staged(mixture(), stages=stages)], NUM_STEPS)
    running = [staged(mixture(), stages=stages, hosts=hosts, host=n) for n in range(hosts)]
    for step in range(NUM_STEPS):
        state = running[-1].get_state()
        resumed = [
            staged(mixture(), stages=stages, hosts=new_hosts, host=n) for n in range(new_hosts)
        ]
        for one in resumed:
            one.set_state(state)
        for now, then in zip(take(resumed, 2), expected[step : step + 2], strict=False):
            np.testing.assert_array_equal(now, then)
        np.testing.assert_array_equal(take(running, 1)[0], expected[step])
        assert running[0].local_batch_size * hosts == len(expected[step])


@pytest.mark.parametrize("source", [Tokens.HParams.config(), mixture()])
def test_input_that_skips_steps_continues_as_one_that_read_them(source):
    expected = take([staged(source)], NUM_STEPS)
    for step in range(NUM_STEPS):
        later = staged(source)
        later.skip_steps(step)
        np.testing.assert_array_equal(take([later], 1)[0], expected[step])


def test_weights_change_linearly_over_a_stage_and_stay():
    stages = (
        StageRows(10, 4, 16, {"web": 1, "code": 1}),
        StageRows(50, 4, 16, {"web": [1, 0], "code": 1, "anneal": [0, 1]}),
        StageRows(20, 4, 16),
    )
    batches = take([staged(mixture(), stages=stages)], 80)
    owner = np.concatenate(batches)[:, 0] // 10_000  # web, code, anneal
    counts = np.cumsum(np.eye(3)[owner], axis=0)
    part = np.clip((np.arange(320) + 0.5 - 40) / 200, 0, 1)
    shares = np.stack([(1 - part) / 2, np.full(320, 0.5), part / 2], axis=1)
    assert np.abs(counts - np.cumsum(shares, axis=0)).max() < 1.2


def test_each_component_goes_on_where_it_was_when_the_weights_change():
    batches = take([staged(mixture(), stages=MIXED)], 19)
    rows = np.concatenate([batch.ravel() for batch in batches]).reshape(-1, LENGTH)
    owner = rows[:, 0] // 10_000  # web, code, anneal
    stage_rows = [5 * 4 // 2, 4 * 6, 6 * 4, 4 * 4]
    parts = np.split(owner, np.cumsum(stage_rows)[:-1])
    counts = [np.bincount(part, minlength=3).tolist() for part in parts]
    # 24 rows at 1:3 are 6 and 18, and the last stage has one component.
    assert counts == [[5, 5, 0], [12, 12, 0], [6, 0, 18], [0, 16, 0]]
    for number, component in enumerate(mixture().components.values()):  # type: ignore[attr-defined]
        source = component.clone(is_training=True, batch_size=1).Instantiate()
        mine = rows[owner == number]
        assert len(mine) > (source.num_rows if number else 0)  # epochs of the small ones
        expected = np.concatenate([source.get_next().ids for _ in range(len(mine))])
        np.testing.assert_array_equal(mine, expected)


def test_a_state_fits_other_later_stages_and_no_other_earlier_ones():
    running = staged(mixture(), stages=MIXED)
    take([running], 12)  # within the third stage
    state = running.get_state()
    longer = (*MIXED[:3], StageRows(9, 4, 16, {"web": 1, "code": 4}))
    other = staged(mixture(), stages=longer)
    other.set_state(state)
    np.testing.assert_array_equal(take([other], 3), take([running], 3))
    earlier = (MIXED[0]._replace(weights={"web": 1}), *MIXED[1:])
    with pytest.raises(ConfigError, match="turns"):
        staged(mixture(), stages=earlier).set_state(state)
    # With another batch, the weights would change after another number of steps.
    running = staged(mixture(), stages=MIXED)
    take([running], 3)
    smaller = tuple(stage._replace(batch=stage.batch // 2) for stage in MIXED)
    with pytest.raises(ConfigError, match="tokens of 3 steps"):
        staged(mixture(), stages=smaller).set_state(running.get_state())


@pytest.mark.parametrize(
    "stages",
    [MIXED, (MIXED[0]._replace(weights=None), *MIXED[1:]), (*STAGES[:2], *MIXED[2:])],
)
@pytest.mark.parametrize("step", [2, 5, 7])
def test_data_that_begin_at_a_later_step_resume(stages: tuple[StageRows, ...], step: int):
    """The first mixture is in the first stage, the second or the third."""
    running = staged(mixture(), stages=stages)
    running.set_state(running.state_at(step, running.get_state()))
    whole = [staged(mixture(), stages=stages)]
    assert take([running], 1)[0].shape == take(whole, step + 1)[-1].shape
    for now in range(step + 1, sum(stage.num_steps for stage in stages)):
        state = json.loads(json.dumps(running.get_state()))
        resumed = staged(mixture(), stages=stages)
        resumed.set_state(resumed.state_at(now, state))
        np.testing.assert_array_equal(take([resumed], 1)[0], take([running], 1)[0])


def test_the_first_mixture_begins_at_its_step_in_data_that_begin_at_a_later_one():
    stages = (StageRows(4, 4, 8), StageRows(2, 4, 16, {"anneal": 1}))
    running = staged(mixture(), stages=stages)
    running.set_state(running.state_at(3, running.get_state()))
    before, *after = take([running], 3)
    assert (before < 20_000).any() and (np.stack(after) >= 20_000).all()


@pytest.mark.parametrize("step", range(12))
def test_data_that_begin_at_a_later_step_have_the_weights_of_its_stage(step: int):
    changes = {"anneal": [0, 1], "web": [1, 0]}
    stages = (
        StageRows(2, 8, 8),
        StageRows(2, 4, 16, {"anneal": 1}),
        StageRows(4, 64, 16, changes),
        StageRows(4, 4, 16),
    )
    running = staged(mixture(), stages=stages)
    running.set_state(running.state_at(step, running.get_state()))
    shares = [(batch >= 20_000).mean() for batch in take([running], 12 - step)]
    # A step reads an eighth to seven eighths of the linear change.
    expected = np.array([1 / 3, 1 / 3, 1, 1, *np.arange(1, 8, 2) / 8, 1, 1, 1, 1])
    assert np.abs(shares - expected[step:]).max() < 0.1


@pytest.mark.parametrize(("rows", "step"), [(28, 5), (28, 6), (24, 6), (12, 6), (12, 3)])
@pytest.mark.parametrize("is_saved_again", [False, True])
def test_a_mixture_begins_at_its_step_after_a_source_alone(
    rows: int, step: int, is_saved_again: bool
):
    """The rows are those of the steps, more after a rollback, or fewer after a later start."""
    alone = mixture().clone(is_training=True, batch_size=4).Instantiate()  # type: ignore[attr-defined]
    take([alone], rows // 4)
    state = alone.get_state()
    before = (StageRows(6, 4, 16),)
    if is_saved_again:
        middle = staged(mixture(), stages=before)
        middle.set_state(middle.state_at(step, state))
        state = json.loads(json.dumps(middle.get_state()))
    running = staged(mixture(), stages=(*before, StageRows(4, 4, 16, {"anneal": 1})))
    running.set_state(running.state_at(step, state))
    np.testing.assert_array_equal(take([running], 6 - step), take([alone], 6 - step))
    assert (np.stack(take([running], 4)) >= 20_000).all()


@pytest.mark.parametrize("stop", [5, 9])
@pytest.mark.parametrize("kept", [2, 4])
def test_a_mixture_after_a_rollback_begins_at_its_step(stop: int, kept: int):
    """A run is rolled back from its seventh step, stops, and resumes with a stage of one part."""
    before = (StageRows(4, 3, 8), StageRows(5, 5, 8))
    running = staged(mixture(), stages=before)
    take([running], 7)
    running.set_state(running.state_at(kept, running.get_state()))
    take([running], stop - kept)
    state = running.get_state()
    after = (*before, StageRows(4, 4, 16, {"anneal": 1}), StageRows(4, 4, 16, {"web": 1}))
    resumed = staged(mixture(), stages=after)
    resumed.set_state(resumed.state_at(stop, state))
    np.testing.assert_array_equal(take([resumed], 9 - stop), take([running], 9 - stop))
    for name in ("anneal", "web"):
        for _ in range(4):
            again = staged(mixture(), stages=after)
            again.set_state(again.state_at(resumed._step, resumed.get_state()))
            batch = take([resumed], 1)[0]
            np.testing.assert_array_equal(take([again], 1)[0], batch)
            assert (batch // 10_000 == [*mixture().components].index(name)).all()
    other = (before[0], StageRows(5, 6, 8), *after[2:])
    with pytest.raises(ConfigError, match=f"tokens of {stop} steps"):
        staged(mixture(), stages=other).set_state(state)


@pytest.mark.parametrize("length", [8, 32, 64])
def test_cut_rows_are_the_rows_that_are_packed_at_that_length(length: int, tmp_path: Path):
    sizes = [5, 0, 40, 3, 130, 64, 1, 17, 90]
    for number, size in enumerate(sizes):
        (tmp_path / f"{number}.txt").write_text("abcdefghij"[number] * size)

    def rows(seq_length: int) -> NestedMap:
        source = LocalText(paths=[str(tmp_path)], split="all", seq_length=seq_length, batch_size=1)
        count = source._num_rows()
        return source._read_rows(np.arange(count))

    cut, expected = cut_rows(rows(64), parts=64 // length, row_length=64), rows(length)
    assert sorted(cut) == sorted(expected)
    for name, array in expected.items():
        assert cut[name].dtype == array.dtype
        # The last row of 64 ends with padding, which are no rows at the shorter length.
        np.testing.assert_array_equal(cut[name][: len(array)], array)
    assert not cut.weights[len(expected.weights) :].any()


class Changed(Tokens):
    """An input whose batches are no rows by number."""

    def get_next(self) -> NestedMap:
        return super().get_next()


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"stages": (StageRows(1, 4, 5),)}, "length"),
        ({"stages": (StageRows(1, 3, 4),), "hosts": 2}, "batch"),
        ({"stages": (StageRows(1, 4, 4, {"web": 1}),)}, "source"),
        ({"source": Changed.HParams.config()}, "source"),
        ({"source": Tokens.HParams.config(num_rows=0)}, "number of rows"),
        (
            {
                "source": mixture().clone(weights=None, weights_from={0: {"web": 1.0}}),
                "stages": (StageRows(1, 4, 16, {"web": 1.0}),),
            },
            "source.weights_from",
        ),
        (
            {"source": mixture(), "stages": (StageRows(1, 4, 16, {"wep": 1.0}),)},
            "weight at row 0",
        ),
    ],
)
def test_stages_that_do_not_fit_raise(fields: dict, field: str):
    with pytest.raises(ConfigError) as error:
        staged(**fields).get_next()
    assert error.value.field == field


def test_arrays_that_cannot_be_cut_raise():
    with pytest.raises(ConfigError, match=r"\[rows, 16, \.\.\.\]"):
        cut_rows(NestedMap(label=np.zeros(3)), parts=2, row_length=16)
    pair = NestedMap(chosen=NestedMap(ids=np.zeros((3, 16))), ids=np.zeros((3, 16)))
    with pytest.raises(ConfigError, match="chosen"):
        cut_rows(pair, parts=2, row_length=16)
