"""WindowShuffle: every row once in its window, and the same order after any restore."""

from __future__ import annotations

import numpy as np
import pytest

from layerkit.config.nested_map import NestedMap
from layerkit.errors import ConfigError
from layerkit_inputs import BaseInput
from layerkit_inputs.mixing.window_shuffle import WindowShuffle
from layerkit_inputs.testing import laws


class Stream(BaseInput):
    """Numbers from 0 to 39, the host's in blocks of its batch size."""

    at = 0

    def _next(self) -> NestedMap:
        start = self.at * self.global_batch_size + self.infeed_host_index * self.batch_size
        if start >= 40:
            raise StopIteration
        self.at += 1
        rows = np.arange(start, start + self.batch_size)
        rows = np.where(rows < 40, rows, -1).astype(np.int32)
        return NestedMap(provenance=rows, inner=NestedMap(weights=(rows >= 0).astype(np.float32)))

    def _reset(self) -> None:
        self.at = 0


def shuffled(**fields):
    return WindowShuffle(
        **{
            "batch_size": 4,
            "is_training": True,
            "source": Stream.HParams.config(),
            "window_batches": 5,
            **fields,
        }
    )


def rows_of(source, num_batches):
    return [batch.provenance.tolist() for batch in (source.get_next() for _ in range(num_batches))]


def test_each_window_holds_its_rows_in_another_order():
    rows = np.reshape(rows_of(shuffled(), 20), (4, 20))
    for window, first in zip(rows, (0, 20, 0, 20), strict=True):
        assert sorted(window) == list(range(first, first + 20)) != window.tolist()
    assert len({tuple(window % 20) for window in rows}) == 4
    assert rows_of(shuffled(input_random_seed=1), 5) != rows_of(shuffled(), 5)


def test_an_evaluation_keeps_the_order():
    source = shuffled(is_training=False)
    assert [batch.provenance[0] for batch in source.eval_batches()] == list(range(0, 40, 4))


@pytest.mark.parametrize(("window", "reads_ahead"), [(1, False), (5, False), (5, True)])
@pytest.mark.parametrize("law", laws.LAWS, ids=lambda law: law.__name__)
def test_window_shuffle_obeys_the_laws_of_inputs(law, window, reads_ahead, check_law):
    fields = {"window_batches": window}
    check_law(law, lambda **more: shuffled(**{**fields, **more}), reads_ahead=reads_ahead)


def test_wrong_fields_and_states_raise(raises):
    for field, value in (("window_batches", 0), ("source", None)):
        with raises(ConfigError, owner="WindowShuffle", field=field, value=value):
            shuffled(**{field: value})
    state = shuffled().get_state()
    with raises(ConfigError, field="window_batches", value=2):
        shuffled(window_batches=2).set_state(state)
