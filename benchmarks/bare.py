"""A bare program: the hand-written model of the quickstart's size, to its first printed loss.

It does what `benchmarks/startup.py` measures of the runner, with nothing around it: no
configuration, no checkpoints, no reports.
"""

from __future__ import annotations

import pydoc_data.topics

import handwritten
import jax
import numpy as np

BATCH, LENGTH = 8, 128


def main() -> None:
    """Takes one training step on text and prints the loss."""
    config = handwritten.Config(vocab_size=259, dims=128, num_layers=5, num_heads=4, mlp_dims=384)
    optimizer = handwritten.make_optimizer(
        peak_learning_rate=1e-3, num_steps=1000, warmup_steps=100
    )
    text = "".join(pydoc_data.topics.topics.values()).encode()
    ids = np.frombuffer(text, np.uint8)[: BATCH * (LENGTH + 1)].reshape(BATCH, LENGTH + 1)
    batch = {
        "ids": ids[:, :-1].astype(np.int32) + 3,
        "labels": ids[:, 1:].astype(np.int32) + 3,
        "weights": np.ones((BATCH, LENGTH), np.float32),
        "segment_ids": np.ones((BATCH, LENGTH), np.int32),
        "segment_pos": np.tile(np.arange(LENGTH, dtype=np.int32), (BATCH, 1)),
    }

    @jax.jit
    def init() -> tuple[handwritten.Params, object]:
        params = handwritten.init_params(jax.random.key(0), config)
        return params, optimizer.init(params)

    params, opt_state = init()
    *_, loss = handwritten.make_train_step(config, optimizer)(params, opt_state, batch)
    print(f"loss {float(loss):.4f}", flush=True)


if __name__ == "__main__":
    main()
