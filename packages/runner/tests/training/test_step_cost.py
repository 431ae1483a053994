"""Model FLOPs of a step, counted by hand; `plan/test_bounds.py` has those of a step as traced."""

from __future__ import annotations

import numpy as np
import optax
import pytest

from layerkit.config import Partial
from layerkit.layers import StackedTransformerRepeated
from layerkit.models import LanguageModel, TransformerLm
from layerkit.nested_map import NestedMap
from layerkit_runner.config.experiment import BaseExperiment
from layerkit_runner.config.resolve import resolve
from layerkit_runner.optim.learner import Learner
from layerkit_runner.training.step_cost import model_flops_per_step
from layerkit_runner.training.task import SingleTask
from layerkit_runner.training.train_hparams import TrainHParams

ROWS, LENGTH, VOCAB, DIMS, HIDDEN, LAYERS = 4, 8, 32, 16, 64, 2
# Products of one token, two FLOPs for each multiply-add.
PROJECTIONS = 2 * 4 * DIMS * DIMS
ATTENTION = 2 * 2 * LENGTH * DIMS / 2  # causal
FEED_FORWARD = 2 * 2 * DIMS * HIDDEN
LAYER = PROJECTIONS + ATTENTION + FEED_FORWARD
LOGITS = 2 * DIMS * VOCAB


class Small(BaseExperiment):
    FROZEN: list[str] = []

    def task(self):
        lm = TransformerLm.HParams.config(
            vocab_size=VOCAB, model_dims=DIMS, hidden_dims=HIDDEN, num_layers=LAYERS, num_heads=2
        )
        lm.stack_tpl = StackedTransformerRepeated.HParams.config(remat="full")
        lm.softmax_tpl.chunk_size = 4
        learner = Learner.HParams.config(
            optimizer=Partial(optax.adam), learning_rate=1e-3, frozen=self.FROZEN
        )
        return SingleTask.HParams.config(
            model=LanguageModel.HParams.config(lm_tpl=lm),
            train=TrainHParams.HParams.config(learner=learner),
        )

    def datasets(self):
        return []


def test_flops_of_64_bit_batches_are_those_of_32_bit_batches():
    ids = np.ones((1, LENGTH), np.int64)
    weights = np.ones((1, LENGTH), np.float64)
    batch = NestedMap(ids=ids, labels=ids, paddings=np.zeros_like(weights), weights=weights)
    found = model_flops_per_step(resolve(Small()).task, batch, rows=ROWS)
    assert found == ROWS * LENGTH * 3 * (LAYERS * LAYER + LOGITS)


@pytest.mark.parametrize(
    ("frozen", "gradients"),
    [
        pytest.param([], 2 * (LAYERS * LAYER + LOGITS), id="nothing"),
        # The layers hand gradients on, and the table of tokens, being tied, needs one of its own.
        pytest.param(
            ["lm/stack/.*"],
            LAYERS * (PROJECTIONS + 2 * ATTENTION + FEED_FORWARD) + 2 * LOGITS,
            id="layers",
        ),
        # Whatever is trained, the gradient goes through all layers, which are one loop.
        pytest.param(["lm/softmax/.*"], 2 * LAYERS * LAYER + LOGITS, id="tokens"),
    ],
)
def test_frozen_weights_reduce_the_flops(frozen: list[str], gradients: float):
    ids = np.ones((1, LENGTH), np.int32)
    batch = NestedMap(
        ids=ids, labels=ids, paddings=np.zeros_like(ids, np.float32), weights=ids.astype(np.float32)
    )
    found = model_flops_per_step(resolve(Small(FROZEN=frozen)).task, batch, rows=ROWS)
    assert found == ROWS * LENGTH * (LAYERS * LAYER + LOGITS + gradients)
