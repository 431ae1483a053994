"""First fit on several sides."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from layerkit_inputs.seqio_adaptor.converters import first_fit


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 7)), max_size=40))
@settings(deadline=None, max_examples=60)
def test_every_item_is_placed_once_in_the_first_row_with_room(sizes):
    rows = list(first_fit(sizes, (9, 7)))
    assert sorted(number for row in rows for number in row) == list(range(len(sizes)))
    for row in rows:
        assert (np.sum([sizes[number] for number in row], axis=0) <= (9, 7)).all()
    where = {number: row for row, numbers in enumerate(rows) for number in numbers}
    for number, size in enumerate(sizes):
        for earlier in range(where[number]):
            held = [sizes[other] for other in rows[earlier] if other < number]
            assert not (np.sum(held, axis=0) + size <= (9, 7)).all()
