"""Tests of the envelope of a state."""

from __future__ import annotations

import pytest

from layerkit.errors import ConfigError
from layerkit_inputs.base.state import check_same_data, pack_state, unpack_state

HOST = {"reader": "Reader", "scope": "host", "host_index": 1, "num_hosts": 2}
GLOBAL = {**HOST, "scope": "global"}


@pytest.mark.parametrize("owner", [HOST, GLOBAL])
def test_a_position_comes_back_and_is_a_copy(owner):
    position = {"at": [3]}
    envelope = pack_state(position, **owner)
    position["at"][0] = 4
    assert unpack_state(envelope, **owner) == {"at": [3]}


def test_a_global_state_fits_any_host():
    envelope = pack_state({"at": 3}, **GLOBAL)
    assert unpack_state(envelope, **{**GLOBAL, "host_index": 5, "num_hosts": 7}) == {"at": 3}


@pytest.mark.parametrize(
    ("written", "reader", "value"),
    [
        (HOST, {**HOST, "num_hosts": 4}, {"host": [1, 2]}),
        (HOST, GLOBAL, {"host": [1, 2], "scope": "host"}),
        (HOST, {**HOST, "reader": "Other"}, {"reader": "Reader"}),
        (GLOBAL, {**GLOBAL, "reader": "Other"}, {"reader": "Reader"}),
    ],
    ids=["host", "scope", "reader of host scope", "reader of global scope"],
)
def test_state_of_another_reader_scope_or_host_raises(raises, written, reader, value):
    with raises(ConfigError, field="state", value=value):
        unpack_state(pack_state({}, **written), **reader)


def test_state_of_other_data_raises_with_the_differences(raises):
    then = {"num_rows": 3, "seed": 1, "window": 2}
    check_same_data("Rows", then, dict(reversed(then.items())))
    value = {"num_rows": 3, "paths": None, "window": 2}
    with raises(ConfigError, owner="Rows", field="state.data", value=value):
        check_same_data("Rows", then, {"num_rows": 4, "seed": 1, "paths": ["a"]})
