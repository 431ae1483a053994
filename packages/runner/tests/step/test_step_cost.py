"""Model FLOPs of a step, counted by hand, and the memory that it needs besides its results.

`plan/test_bounds.py` has the FLOPs of a step as traced.
"""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from layerkit.base.base_layer import BaseLayer
from layerkit.base.base_model import BaseModel, WeightedScalar
from layerkit.config import Config, Partial, sub_config_field
from layerkit.config.nested_map import NestedMap
from layerkit.layers import FeedForward, StackedTransformerRepeated
from layerkit.layers.moe.token_choice import MoeFeedForward
from layerkit.layers.transformer.pipeline import Pipeline
from layerkit.models import LanguageModel, TransformerLm
from layerkit_runner.config.experiment import BaseExperiment
from layerkit_runner.optim.learner import Learner
from layerkit_runner.run.resolve import resolve
from layerkit_runner.step.step_cost import model_flops_per_step, temporary_bytes
from layerkit_runner.step.task import SingleTask
from layerkit_runner.step.train_hparams import TrainHParams

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


@pytest.mark.parametrize("bits", [32, 64])
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
def test_frozen_weights_reduce_the_flops(frozen: list[str], gradients: float, bits: int):
    ids, weights = np.ones((1, LENGTH), f"int{bits}"), np.ones((1, LENGTH), f"float{bits}")
    batch = NestedMap(ids=ids, labels=ids, paddings=np.zeros_like(weights), weights=weights)
    result = model_flops(resolve(Small(FROZEN=frozen)).task, batch)
    assert result == ROWS * LENGTH * (LAYERS * LAYER + LOGITS + gradients)


def model_flops(task: Config, batch: NestedMap) -> float:
    made = task.Instantiate()
    state = jax.eval_shape(lambda: made.init_state(jax.random.key(0)))
    return model_flops_per_step(task, state, batch, rows=ROWS)


class LayerModel(BaseModel):
    """A model of one layer, whose mean output is the loss."""

    layer_tpl: Config[BaseLayer] = sub_config_field(None)

    def setup(self):
        self.create_child("layer", self.layer_tpl)

    def compute_predictions(self, batch):
        return self.layer(batch.x)

    def compute_loss(self, predictions, batch):
        return {"loss": WeightedScalar.of(jnp.mean(predictions), 1.0)}, NestedMap()


def layer_flops(layer, *, frozen: list[str] | None = None) -> float:
    """Return the model FLOPs of a layer per token, with averages of the weights."""
    task = resolve(Small(FROZEN=frozen or [])).task
    task.model = LayerModel.HParams.config(layer_tpl=layer)
    task.train.learner.ema_decay = 0.9
    task.train.eval_use_ema_states = True
    batch = NestedMap(x=np.ones((1, LENGTH, DIMS), "float32"))
    return model_flops(task, batch) / ROWS / LENGTH


def test_pipeline_of_any_layer_counts_its_stages():
    stage = FeedForward.HParams.config(input_dims=DIMS, output_dims=DIMS)
    layer = Pipeline.HParams.config(stage_tpl=stage, num_stages=3, num_microbatches=3)
    products = 3 * 2 * DIMS * DIMS
    assert layer_flops(layer) == 3 * products
    # Frozen weights need no gradient, those below trained ones hand it on.
    assert layer_flops(layer, frozen=["layer/stage/bias/.*"]) == 3 * products
    assert layer_flops(layer, frozen=["layer/stage/linear/.*"]) == 2 * products


@pytest.mark.parametrize(
    "fields",
    [
        {"grouped_matmul": "pallas"},
        # Groups of a whole batch, of less than a row.
        {"num_groups": 8, "capacity_factor": 1.0, "capacity_in_evaluation": True},
    ],
    ids=["kernel", "groups"],
)
def test_experts_are_counted_on_any_device_and_without_slots(fields):
    layer = MoeFeedForward.HParams.config(
        input_dims=DIMS, hidden_dims=HIDDEN, num_experts=4, **fields
    )
    # Two choices of three products, since experts have a gate; the loss of the router adds little.
    router, choice = 2 * DIMS * 4, 3 * 2 * DIMS * HIDDEN
    assert layer_flops(layer) == pytest.approx(3 * (router + 2 * choice), rel=0.01)


def test_tpu_temporaries_are_the_peak_less_other_memory():
    # `lm.c4.C4Spmd16BAdam32Replicas` on v4:2x4x4, which libtpu 0.0.42 fits into 33.0 GB.
    stats = SimpleNamespace(
        argument_size_in_bytes=6_201_625_088,
        output_size_in_bytes=6_200_976_384,
        alias_size_in_bytes=6_200_969_728,
        temp_size_in_bytes=31_022_552_576,
        peak_memory_in_bytes=29_400_133_120,
        host_argument_size_in_bytes=0,
        host_output_size_in_bytes=0,
        host_alias_size_in_bytes=0,
    )
    results = 6_200_976_384 - 6_200_969_728
    result = temporary_bytes(stats, platform="tpu")
    assert 6_201_625_088 + results + result == 29_400_133_120
    assert temporary_bytes(stats, platform="gpu") == 31_022_552_576
    stats.peak_memory_in_bytes = 0
    assert temporary_bytes(stats, platform="tpu") == 31_022_552_576


def test_tpu_temporaries_do_not_include_a_state_in_host_memory():
    # A loop over 16 layers of 4096 × 4096 on v5e:2x2, with Adam's state in host memory. The device
    # holds 270.5 MB of arguments and at most 403.8 MB of temporaries, but the peak is 1,210 MB.
    stats = SimpleNamespace(
        argument_size_in_bytes=270_532_608,
        output_size_in_bytes=268_435_968,
        alias_size_in_bytes=268_435_456,
        temp_size_in_bytes=403_750_400,
        peak_memory_in_bytes=1_210_081_792,
        host_argument_size_in_bytes=536_870_912,
        host_output_size_in_bytes=536_870_912,
        host_alias_size_in_bytes=536_870_912,
    )
    result = temporary_bytes(stats, platform="tpu")
    assert result == 1_210_081_792 - 536_870_912 - 270_533_120 < stats.temp_size_in_bytes


def test_cpu_temporaries_hold_intermediate_results():
    compiled = jax.jit(lambda x: (x @ x) @ x).lower(jnp.ones((64, 64))).compile()
    assert temporary_bytes(compiled.memory_analysis(), platform="cpu") >= 4 * 64 * 64
