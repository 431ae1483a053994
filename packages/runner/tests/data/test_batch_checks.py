"""check_batch: every batch has the rows that its input declares, and ids are integers."""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import numpy as np
import pytest

from layerkit.nested_map import NestedMap
from layerkit_inputs.base_input import BaseInput
from layerkit_inputs.prefetch import Prefetch
from layerkit_runner.data.batch_checks import cast_text, check_batch
from layerkit_runner.data.device_feed import DeviceFeed
from layerkit_runner.data.infeed import eval_batches, peek_batch
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
    with contextlib.closing(Prefetch(source=dataset)) as ahead:
        DeviceFeed(ahead, partitioner).take(lambda: True)


def enter_by_evaluation(dataset: BaseInput) -> None:
    list(eval_batches(dataset))


WAYS = {
    "training": (enter_by_prefetch, {"is_training": True}),
    "evaluation": (enter_by_evaluation, {}),
    "shapes": (peek_batch, {}),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("arrays", "facts"),
    [
        ({"x": np.zeros((1, 2), np.float32)}, ["'x'", "1 row(s)", "[1, 2]", "Expected 8 rows"]),
        ({"x": np.zeros(8), "y": np.zeros(9)}, ["'y'", "9 row(s)", "Expected 8 rows"]),
        ({"x": np.zeros(8), "rate": np.float32(1)}, ["'rate'", "no rows", "Expected 8 rows"]),
        ({"ids": np.zeros((8, 4))}, ["'ids'", "float64", "int32"]),
        ({"tgt": NestedMap(ids=np.zeros((8, 4), np.float32))}, ["'tgt.ids'", "float32", "int32"]),
        ({"segment_ids": np.zeros((8, 4), bool)}, ["'segment_ids'", "bool", "int32"]),
    ],
)
def test_batch_that_is_not_as_declared_raises_wherever_it_enters(
    way: str, arrays: dict[str, Any], facts: list[str]
):
    enter, fields = WAYS[way]
    with pytest.raises(UsageError) as caught:
        enter(Given(batch_size=8, name="web", arrays=arrays, **fields))
    assert "\n" not in str(caught.value)
    for fact in ["input 'web' (Given)", *facts]:
        assert fact in str(caught.value)


@pytest.mark.parametrize("way", WAYS)
def test_batch_as_declared_passes(way: str):
    enter, fields = WAYS[way]
    arrays = {"ids": np.zeros((8, 4), np.uint16), "labels": np.zeros(8), "image": np.zeros((8, 2))}
    enter(Given(batch_size=8, arrays=arrays, **fields))


def test_padding_of_an_evaluation_is_declared_too():
    dataset = Given(batch_size=8, batch_padding_size=2, arrays={"x": np.zeros(8)})
    assert [len(batch.x) for batch in eval_batches(dataset)] == [10, 10, 10]
    dataset.reset()
    with pytest.raises(UsageError, match="Expected 10 rows"):
        check_batch(dataset, dataset.get_next(), is_padded=True)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("value", "dtype"), [(2**31, np.int64), (-(2**31) - 1, np.int64), (2**32, np.uint64)]
)
def test_integer_that_jax_would_wrap_around_raises(way: str, value: int, dtype: Any):
    enter, fields = WAYS[way]
    arrays = {"x": np.zeros((8, 2), dtype)}
    arrays["x"][3, 1] = value
    text = rf"input 'web' \(Given\): .* 'x' has dtype={dtype.__name__} and holds {value}\. Expected"
    with pytest.raises(UsageError, match=text):
        enter(Given(batch_size=8, name="web", arrays=arrays, **fields))


@pytest.mark.parametrize("value", [2**31 - 1, -(2**31)])
def test_integer_of_64_bits_that_fits_32_enters(value: int):
    dataset = Given(batch_size=1, arrays={"x": np.array([value])})
    assert check_batch(dataset, dataset.get_next()).x == value


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
