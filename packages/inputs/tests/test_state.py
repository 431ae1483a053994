"""The envelope of a state: whose it is, and who may go on from it."""

from __future__ import annotations

import re

import pytest

from layerkit_inputs.state import pack_state, unpack_state, why_data_differ

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


def test_a_host_state_fits_that_host_alone():
    envelope = pack_state({"at": 3}, **HOST)
    whole = (
        "the state belongs to host 1 of 2, but Reader is host 1 of 4; a state of scope 'host' fits "
        "only the same host of as many hosts."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(whole)}$"):
        unpack_state(envelope, **{**HOST, "num_hosts": 4})


def test_a_state_of_another_scope_is_refused():
    with pytest.raises(
        ValueError, match="written by Reader with scope 'host', but it keeps states"
    ):
        unpack_state(pack_state({}, **HOST), **GLOBAL)


@pytest.mark.parametrize("owner", [HOST, GLOBAL])
def test_a_state_of_another_reader_is_refused(owner):
    whole = (
        "the state was written by Reader and does not fit Other; use the reader that wrote it, or "
        "start a new run from the weights alone."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(whole)}$"):
        unpack_state(pack_state({}, **owner), **{**owner, "reader": "Other"})


@pytest.mark.parametrize("field", ["reader", "scope", "position", "host"])
def test_an_envelope_that_lacks_something_is_refused(field):
    envelope = pack_state({"at": 3}, **HOST)
    del envelope[field]
    whole = "a dict with ['reader', 'scope', 'position', 'host']; got {"
    with pytest.raises(ValueError, match=re.escape(whole)):
        unpack_state(envelope, **HOST)


@pytest.mark.parametrize("nonsense", [None, 3, {}, {"position": {}}])
def test_what_is_no_state_is_refused(nonsense):
    with pytest.raises(ValueError, match=r"Reader.set_state\(\) needs what get_state\(\) returned"):
        unpack_state(nonsense, **GLOBAL)


def test_what_differs_between_data_is_said():
    then = {"num_rows": 3, "seed": 1, "window": 2}
    assert why_data_differ(then, dict(reversed(then.items()))) is None
    problem = why_data_differ(then, {"num_rows": 4, "seed": 1, "paths": ["a"]})
    assert problem is not None and problem.startswith(
        "the state does not fit this data: num_rows was 3 and is 4; paths was None and is ['a']; "
        "window was 2 and is None. "
    )
