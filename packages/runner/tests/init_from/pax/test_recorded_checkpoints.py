"""Checkpoints of Paxml, restored and trained on, equal what Paxml trained itself."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from layerkit.config import Partial
from layerkit.interop.praxis import axis_order
from layerkit_runner.errors import UsageError
from layerkit_runner.optim.sharded_adafactor import sharded_adafactor

# Praxis quantizes the momentum of the three projections as one weight.
COMBINED = {"lm_tpl.stack_tpl.layer_tpl.attention_tpl.combined_qkv": True}


def adafactor(**fields: Any) -> Any:
    return Partial(
        sharded_adafactor, decay_adam=0.99, weight_decay=1e-3, axis_order=axis_order, **fields
    )


ADAFACTOR = {"edit": COMBINED, "optimizer": adafactor()}


_LAYER = "lm_tpl.stack_tpl.layer_tpl"
PRIMER_MULTI_QUERY = {
    "lm_tpl.num_kv_heads": 1,
    f"{_LAYER}.norm_policy": "pre_post",
    f"{_LAYER}.attention_tpl.per_dim_scale": False,
    f"{_LAYER}.attention_tpl.use_bias": True,
}


@pytest.mark.parametrize(
    ("case", "stack", "options"),
    [
        ("stacked_ocdbt", "stacked", {}),
        # The state of the optimizer moves from separate to stacked layers.
        ("unstacked_flax", "stacked", {}),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ("stacked_zarr", "stacked", {}),
                ("stacked_zarr", "unstacked", {}),
                ("unstacked_flax", "unstacked", {}),
                ("pipelined_zarr", "pipelined", {"num_layers": 4}),
                ("primer_multi_query_ocdbt", "stacked", {"edit": PRIMER_MULTI_QUERY}),
                ("primer_multi_query_ocdbt", "unstacked", {"edit": PRIMER_MULTI_QUERY}),
                ("adafactor_stacked_ocdbt", "stacked", ADAFACTOR),
                ("adafactor_unstacked_flax", "stacked", ADAFACTOR),
                ("adafactor_unstacked_flax", "unstacked", ADAFACTOR),
            ]
        ),
    ],
)
def test_training_continues_with_the_losses_of_paxml(
    pax: Any, case: str, stack: str, options: dict[str, Any]
):
    losses = pax.train(stack, folder=str(pax.folder / case), **options, **pax.whole_state)
    np.testing.assert_allclose(losses[0], pax.losses[case][0], rtol=0, atol=2e-6)
    np.testing.assert_allclose(losses, pax.losses[case], rtol=0, atol=1e-4)


def test_weights_alone_give_the_first_loss_and_then_others(pax: Any):
    losses = pax.train("stacked", folder=str(pax.folder / "stacked_zarr"))
    expected = pax.losses["stacked_zarr"]
    np.testing.assert_allclose(losses[0], expected[0], rtol=0, atol=2e-6)
    assert max(np.abs(np.subtract(losses, expected))) > 1e-2


def test_each_format_restores_onto_a_sharded_mesh(pax: Any):
    for case in ("stacked_zarr", "stacked_ocdbt"):
        first = pax.plan(case, mesh=(1, 2, 2), **pax.whole_state)()
        assert first.step == pax.step
        expected = pax.plan(case, **pax.whole_state)().state
        weight = first.state.params["lm"]["stack"]["repeat"]["sub"]["feed_forward"]["up"]["w"]
        assert weight.addressable_shards[0].data.size == weight.size // 4
        jax.tree.map(np.testing.assert_array_equal, first.state, expected)


@pytest.mark.parametrize(
    ("edit", "fields", "missing"),
    [
        (None, {}, "m_scale/lm/stack/repeat/sub/attention/query/w"),
        (COMBINED, {"quantized_dtype": "float32"}, "m/lm/softmax/w"),
        (COMBINED, {"factored": False}, "v/lm/softmax/w"),
    ],
    ids=["separate projections", "momentum of another dtype", "no factors"],
)
def test_state_that_the_optimizer_lacks_raises(pax: Any, edit: Any, fields: Any, missing: str):
    options = {"edit": edit, "optimizer": adafactor(**fields), **pax.whole_state}
    with pytest.raises(UsageError, match=f"{missing} is not in"):
        pax.plan("adafactor_stacked_ocdbt", **options)
