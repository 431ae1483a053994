"""Arrays of an optimizer have the axes of the weights they belong to."""

from __future__ import annotations

from typing import Any

import jax
import optax
import pytest
from jax.sharding import PartitionSpec

from layerkit.config import Config, Partial
from layerkit_runner.optim.sharded_adafactor import sharded_adafactor


@pytest.mark.parametrize(
    "optimizer",
    [
        Partial(optax.adamw, mask=lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params)),
        Partial(optax.sgd, momentum=0.9, nesterov=True),
        Partial(optax.lion),
    ],
)
def test_every_weight_and_moment_has_axes(arrangements: Any, optimizer: Config):
    task = arrangements.sgd_task(arrangements.language_model(), optimizer=optimizer)
    axes = arrangements.axes_of_state(task)
    weight = "['lm']['stack']['repeat']['sub']['attention']['query']['w']"
    result = {path: named for path, named in axes.items() if path.endswith(weight)}
    assert len(result) in (2, 3)  # the weight, and one or two moments
    assert set(result.values()) == {("layers", "embed", "heads", "head_dim")}
    assert not [path for path, named in axes.items() if named and None in named]
    assert axes[".step"] == ()


def test_arrays_of_another_shape_are_divided_over_the_mesh_axes_of_their_weight(arrangements: Any):
    """Row moments `[layers, heads, head_dim]` of a weight over two mesh axes."""
    factored = Partial(optax.adafactor, min_dim_size_to_factor=4)
    task = arrangements.sgd_task(arrangements.language_model(), optimizer=factored)
    rows = "v_row['lm']['stack']['repeat']['sub']['attention']['query']['w']"
    [axes] = [axes for path, axes in arrangements.axes_of_state(task).items() if rows in path]
    assert axes == ("layers", None, None)
    state = arrangements.start([2, 2, 2], task).abstract_state(task)
    leaves = jax.tree_util.tree_leaves_with_path(state)
    [leaf] = [leaf for path, leaf in leaves if rows in jax.tree_util.keystr(path)]
    assert leaf.shape == (2, 8, 4)
    assert leaf.sharding.spec == PartitionSpec(None, ("fsdp", "tensor"), None)


def test_reduced_dimensions_have_no_axis(arrangements: Any):
    optimizer = Partial(sharded_adafactor, quantized_dtype="int8")
    task = arrangements.sgd_task(arrangements.language_model(), optimizer=optimizer)
    axes = arrangements.axes_of_state(task)
    stacked = ".opt_state['main-layers-2']"
    weight = "['lm']['stack']['repeat']['sub']['attention']['query']['w']"
    assert axes[f"{stacked}.m{weight}"] == ("layers", "embed", "heads", "head_dim")
    # The scale has one value for all of the first dimension, behind that of the layers.
    assert axes[f"{stacked}.m_scale{weight}"] == ("layers", None, "heads", "head_dim")
    assert axes[f"{stacked}.vr{weight}"] == ("layers", "embed", "heads", None)
    assert axes[f"{stacked}.vc{weight}"] == ("layers", "embed", None, "head_dim")


def test_non_trainables_have_axes(arrangements: Any, tiny: Any):
    axes = arrangements.axes_of_state(tiny.task_config(counts=True).Instantiate())
    assert axes[".non_trainable['counter']['sum']"] == ()
    assert axes[".params['linear']['w']"] == ("embed", "mlp")
