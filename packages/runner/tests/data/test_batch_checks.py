"""check_batch: every batch has the rows that its input declares, and integers fit."""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import numpy as np
import pytest

from layerkit.config.nested_map import NestedMap
from layerkit.errors import ConfigError
from layerkit_inputs.base.base_input import BaseInput
from layerkit_inputs.base.host_batches import check_batch
from layerkit_runner.data.host_inputs import cast_text, eval_batches, peek_batch, prefetched
from layerkit_runner.data.train_inputs import DeviceFeed
from layerkit_runner.errors import UsageError
from layerkit_runner.partitioning import SpmdPartitioner


class Given(BaseInput):
    """Gives the same arrays each time; three times outside of training."""

    arrays: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.count = 0

    def _next(self) -> NestedMap:
        self.count += 1
        if self.count > 3 and not self.is_training:
            raise StopIteration
        return NestedMap(self.arrays)

    def _reset(self) -> None:
        self.count = 0


def enter_by_prefetch(dataset: BaseInput) -> None:
    partitioner = SpmdPartitioner()
    partitioner.start()
    with contextlib.closing(prefetched(dataset)) as ahead:
        DeviceFeed(ahead, partitioner).take(lambda: True)


def enter_by_evaluation(dataset: BaseInput) -> None:
    list(eval_batches(dataset))


WAYS = {
    "training": (enter_by_prefetch, {"is_training": True}),
    "evaluation": (enter_by_evaluation, {}),
    "shapes": (peek_batch, {}),
}


OWNER = "Given 'web'"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("arrays", "field", "value"),
    [
        ({"x": np.zeros((1, 2), np.float32)}, "shape of x", [1, 2]),
        ({"x": np.zeros(8), "y": np.zeros(9)}, "shape of y", [9]),
        ({"x": np.zeros(8), "rate": np.float32(1)}, "shape of rate", []),
    ],
)
def test_undeclared_batch_raises_in_each_reader(
    raises, way: str, arrays: dict[str, Any], field: str, value: Any
):
    enter, fields = WAYS[way]
    with raises(UsageError, owner=OWNER, field=field, value=value):
        enter(Given(batch_size=8, name="web", arrays=arrays, **fields))


@pytest.mark.parametrize("way", WAYS)
def test_batch_as_declared_passes(way: str):
    enter, fields = WAYS[way]
    arrays = {"ids": np.zeros((8, 4), np.uint16), "labels": np.zeros(8), "image": np.zeros((8, 2))}
    enter(Given(batch_size=8, arrays=arrays, **fields))


def test_evaluation_batch_includes_its_padding(raises):
    dataset = Given(batch_size=8, batch_padding_size=2, arrays={"x": np.zeros(8)})
    assert [len(batch.x) for batch in eval_batches(dataset)] == [10, 10, 10]
    dataset.reset()
    with raises(ConfigError, field="shape of x", value=[8]):
        check_batch(dataset, dataset.get_next(), is_padded=True)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("value", "dtype"), [(2**31, np.int64), (-(2**31) - 1, np.int64), (2**32, np.uint64)]
)
def test_integer_that_jax_would_wrap_around_raises(raises, way: str, value: int, dtype: Any):
    enter, fields = WAYS[way]
    arrays = {"x": np.zeros((8, 2), dtype)}
    arrays["x"][3, 1] = value
    with raises(UsageError, owner=OWNER, field=f"{dtype.__name__} value of x", value=value):
        enter(Given(batch_size=8, name="web", arrays=arrays, **fields))


def test_cast_text_names_the_floats_that_lose_bits():
    batch = NestedMap(
        x=np.zeros(2),
        side=NestedMap(y=np.zeros(2), z=np.zeros(2, np.complex128)),
        ids=np.zeros(2, np.int64),
        half=np.zeros(2, np.float16),
    )
    assert cast_text(batch) == (
        "side.y, x: float64 → float32; side.z: complex128 → complex64 (JAX_ENABLE_X64 is off)"
    )
    assert cast_text(NestedMap(x=np.zeros(2, np.float32), names=np.array(["a"]))) is None
    with jax.enable_x64(True):  # noqa: FBT003
        assert cast_text(batch) is None
