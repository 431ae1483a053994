"""An experiment with a small language model, which a separate process can import."""

from __future__ import annotations

import optax

from layerkit.config import Config, Partial
from layerkit.layers import RotaryPositionalEmbedding, StackedTransformerRepeated
from layerkit.models import LanguageModel, TransformerLm
from layerkit_inputs.synthetic.random_tokens import SyntheticInput
from layerkit_runner import BaseExperiment
from layerkit_runner.optim.learner import Learner
from layerkit_runner.partitioning import PmapPartitioner, SpmdPartitioner
from layerkit_runner.step.task import SingleTask
from layerkit_runner.step.train_hparams import TrainHParams


class SmallLm(BaseExperiment):
    """Three repeated layers of 16 dimensions on rows of 8 tokens."""

    NUM_LAYERS: int = 3
    MODEL_DIMS: int = 16
    PERCORE_BATCH_SIZE: float = 1
    MESH: list[int] | None = [2, 2, 2]
    SLICES: list[int] | None = None
    USE_PMAP: bool = False

    def task(self) -> Config:
        lm = TransformerLm.HParams.config(
            vocab_size=32,
            model_dims=self.MODEL_DIMS,
            hidden_dims=32,
            num_layers=self.NUM_LAYERS,
            num_heads=2,
            stack_tpl=StackedTransformerRepeated.HParams.config(remat="full"),
        )
        lm.stack_tpl.layer_tpl.attention_tpl.rotary_tpl = RotaryPositionalEmbedding.HParams.config()
        learner = Learner.HParams.config(optimizer=Partial(optax.adam), learning_rate=1e-3)
        return SingleTask.HParams.config(
            model=LanguageModel.HParams.config(lm_tpl=lm),
            train=TrainHParams.HParams.config(learner=learner),
        )

    def datasets(self) -> list[Config]:
        return [
            SyntheticInput.HParams.config(
                percore_batch_size=self.PERCORE_BATCH_SIZE,
                vocab_size=32,
                seq_length=8,
                is_training=True,
            )
        ]

    def partitioner(self) -> Config:
        if self.USE_PMAP:
            return PmapPartitioner.HParams.config()
        return SpmdPartitioner.HParams.config(ici_mesh_shape=self.MESH, dcn_mesh_shape=self.SLICES)
