"""Tests of the states of readers and hosts that do not fit."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from layerkit.errors import ConfigError
from layerkit_inputs.base.base_input import BaseInput, Scope
from layerkit_inputs.base.errors import check_same_data


class Reader(BaseInput):
    position: Any = None

    def _reader_state(self) -> dict[str, Any]:
        return {"at": self.position}

    def _set_reader_state(self, state: dict[str, Any]) -> None:
        self.position = state["at"]


class Global(Reader):
    state_scope: ClassVar[Scope] = "global"


def make(cls: type[Reader], index: int = 1, count: int = 2, **fields: Any) -> Reader:
    hosts = {"infeed_host_index": index, "num_infeed_hosts": count}
    return cls.HParams.config(batch_size=1, **hosts, **fields).Instantiate()


@pytest.mark.parametrize(("cls", "hosts"), [(Reader, (1, 2)), (Global, (5, 7))])
def test_a_position_comes_back_and_is_a_copy(cls, hosts):
    position = [3]
    state = make(cls, position=position).get_state()
    position[0] = 4
    reader = make(cls, *hosts)
    reader.set_state(state)
    assert reader.position == [3]


@pytest.mark.parametrize(
    ("cls", "count", "value"),
    [
        (Reader, 4, {"host": [1, 2]}),
        (Global, 2, {"host": [1, 2], "reader": "Reader", "scope": "host"}),
    ],
)
def test_state_of_another_reader_or_host_raises(raises, cls, count, value):
    with raises(ConfigError, field="state", value=value):
        make(cls, count=count).set_state(make(Reader).get_state())


def test_state_of_other_data_raises_with_the_differences(raises):
    then = {"num_rows": 3, "seed": 1, "window": 2}
    check_same_data("Rows", then, dict(reversed(then.items())))
    value = {"num_rows": 3, "paths": None, "window": 2}
    with raises(ConfigError, owner="Rows", field="state.data", value=value):
        check_same_data("Rows", then, {"num_rows": 4, "seed": 1, "paths": ["a"]})
