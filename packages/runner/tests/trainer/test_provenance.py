"""What decoded outputs are told apart by."""

from __future__ import annotations

from types import SimpleNamespace

import jax.numpy as jnp

from layerkit_runner.partitioning import SpmdPartitioner
from layerkit_runner.trainer.provenance import weights_digest_fn


def test_the_digest_is_of_the_weights_that_decode(tiny: SimpleNamespace):
    """Averages count where decoding uses them, and only there."""
    digests = {}
    for averaged in (False, True):
        config = tiny.task_config(
            learner={"ema_decay": 0.9}, train={"decode_use_ema_states": averaged}
        )
        task, partitioner = config.Instantiate(), SpmdPartitioner()
        partitioner.start()
        partitioner.bind(task)
        digest, state = weights_digest_fn(task, partitioner), partitioner.init_fn(task)()
        moved = state.replace(ema={"linear": {"w": jnp.full((2, 1), 5.0)}})
        digests[averaged] = (digest(state), digest(moved))
    assert digests[False][0] == digests[False][1] == digests[True][0]
    assert digests[True][1] != digests[True][0]
