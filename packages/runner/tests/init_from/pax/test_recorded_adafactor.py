"""Runs that continue with the ShardedAdafactor of Paxml equal what Paxml trained itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from layerkit.config import Partial
from layerkit.interop.praxis import axis_order
from layerkit_runner.errors import UsageError
from layerkit_runner.init_from import plan_first_state
from layerkit_runner.optim.sharded_adafactor import sharded_adafactor

# Praxis quantizes the momentum of the three projections as one weight.
COMBINED = {"lm_tpl.stack_tpl.layer_tpl.attention_tpl.combined_qkv": True}


def adafactor(**fields: Any) -> Any:
    return Partial(
        sharded_adafactor, decay_adam=0.99, weight_decay=1e-3, axis_order=axis_order, **fields
    )


@pytest.mark.parametrize(
    ("case", "stack"),
    [
        ("adafactor_stacked_ocdbt", "stacked"),
        ("adafactor_unstacked_flax", "unstacked"),
        ("adafactor_unstacked_flax", "stacked"),
    ],
)
def test_training_continues_with_the_losses_of_paxml(pax: Any, case: str, stack: str):
    folder = str(pax.folder / case)
    options = {"edit": COMBINED, "optimizer": adafactor(), **pax.whole_state}
    losses = pax.train(stack, folder=folder, **options)
    np.testing.assert_allclose(losses[0], pax.losses[case][0], rtol=0, atol=2e-6)
    np.testing.assert_allclose(losses, pax.losses[case], rtol=0, atol=1e-4)


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
    partitioner, task = pax.run_of(
        "stacked",
        folder=str(pax.folder / "adafactor_stacked_ocdbt"),
        edit=edit,
        optimizer=adafactor(**fields),
        **pax.whole_state,
    )
    with pytest.raises(UsageError, match=f"{missing} is not in"):
        plan_first_state(partitioner, task)
