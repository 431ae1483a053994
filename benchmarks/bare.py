"""Train one step of the hand-written model with the quickstart's sizes, and print the loss.

This is the baseline of `benchmarks/startup.py`. It has no configuration, checkpoints or reports.
"""

from __future__ import annotations

import pydoc_data.topics

import handwritten
import jax
import numpy as np

BATCH, LENGTH = 8, 128


def main() -> None:
    """Train one step on text and print the loss."""
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
