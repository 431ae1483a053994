"""Blocks of weights equal slices of the whole weights, which the map of names reads."""

from __future__ import annotations

import numpy as np
import pytest

from layerkit.interop.praxis import find_sources
from layerkit_runner.init_from.pax import blocks

QKV = "lm/transformer/{}/self_attention/combined_qkv/w"
OURS = "lm/stack/{}attention/{}/w"


@pytest.mark.parametrize(
    ("theirs", "leading", "place", "over_layers"),
    [
        (["x_layers_0", "x_layers_1", "x_layers_2"], (), "repeat/sub/", (3,)),
        (["x_layers_0", "x_layers_1", "x_layers_2"], (), "layers_2/", ()),
        (["repeat/sub/x_layers_0", "repeat/sub/x_layers_1"], (3,), "repeat/sub/", (6,)),
        (["repeat/sub/x_layers_0"], (4,), "layers_3/", ()),
        (["repeat/sub/x_layers_0"], (4,), "repeat/sub/layers_1/", (2,)),
        (["pipeline/body/x_layers_0"], (2, 3), "pipeline/stage/repeat/sub/", (3, 2, 1)),
    ],
)
@pytest.mark.parametrize("child", ["key", "qkv"])
def test_blocks_equal_slices(
    theirs: list[str],
    leading: tuple[int, ...],
    place: str,
    over_layers: tuple[int, ...],
    child: str,
):
    rng = np.random.default_rng(1)
    stored = {QKV.format(one): rng.normal(size=(*leading, 3, 4, 2, 5)) for one in theirs}
    ours = {OURS.format(place, child), OURS.format(place.replace("_1", "_0"), child)}
    source = find_sources(ours, stored)[OURS.format(place, child)]
    own = (4, 2, 5) if child == "key" else (4, 2, 3, 5)
    one = stored[source.names[0]].shape
    shape = blocks.shape_of(source, one, (*over_layers, *own))
    assert shape == (*over_layers, *own)
    whole = source.read(stored, shape)

    def read(name: str, ranges: tuple[slice, ...]) -> np.ndarray:
        return stored[name][ranges]

    everything = tuple(slice(0, size) for size in shape)
    np.testing.assert_array_equal(blocks.read_block(source, read, one, shape, everything), whole)
    for _ in range(10):
        starts = [int(rng.integers(0, size)) for size in shape]
        stops = [int(rng.integers(a + 1, size + 1)) for a, size in zip(starts, shape, strict=True)]
        ranges = tuple(map(slice, starts, stops))
        block = blocks.read_block(source, read, one, shape, ranges)
        np.testing.assert_array_equal(block, whole[ranges])
