"""The report before the first step."""

from __future__ import annotations

import logging

import jax
import jax.numpy as jnp
import pytest

from layerkit.layers import TransformerFeedForward, quantize_model
from layerkit_runner.run.start_report import (
    compiled_lines,
    layer_notes,
    num_params,
)


def test_notes_of_layers_are_collected_once_and_not_propagated(caplog: pytest.LogCaptureFixture):
    # caplog listens at the root logger, as absl does once TensorFlow is imported.
    logger = logging.getLogger("layerkit.attention")
    with caplog.at_level(logging.INFO, "layerkit"):
        with layer_notes() as notes:
            logger.info("attention backend: %s", "xla")
            logger.info("attention backend: xla")
            logger.warning("slow")
        assert notes == ["attention backend: xla", "slow"]
        assert caplog.messages == []
        logger.info("afterwards")
    assert caplog.messages == ["afterwards"]


def test_temporary_memory_of_the_largest_step_is_reported():
    def compiled(size: int):
        # The product is sorted before the sum, so all of it is stored: 4 bytes for each number.
        step = jax.jit(lambda x: jnp.sort(x @ x.T, axis=None)[::2].sum())
        return step.lower(jnp.ones((size, 1))).compile()

    small, large = compiled(500), compiled(2000)
    (line,) = compiled_lines([large, small])
    size, unit = line.removeprefix("step memory").split()[:2]
    assert unit == "MB" and 16 <= float(size) < 100
    assert [*compiled_lines([small, large])] == [line] != [*compiled_lines([small])]
    assert line.endswith("of temporaries per device")
    assert not [*compiled_lines([])]
    assert [*compiled_lines([small, large], limit=100_000_000)] == [line]
    _, warning = compiled_lines([small, large], limit=16_000_000)
    assert "above the 16 MB of a device" in warning


@pytest.mark.parametrize("weight_format", ["int8", "int4", "nf4:2"])
def test_weights_in_integers_count_as_those_in_floats(weight_format: str):
    config = TransformerFeedForward.HParams.config(input_dims=4, hidden_dims=8, has_bias=True)
    variables = config.Instantiate().init(jax.random.key(0))
    _, stored = quantize_model(config, variables, weight_format=weight_format)
    assert num_params(stored["params"]) == num_params(variables["params"]) == 2 * 4 * 8 + 4 + 8


def test_scales_of_weights_in_floats_count():
    weight = jnp.zeros((3, 2))
    assert num_params({"w": weight, "w_scale": weight, "other_scale": weight}) == 18
