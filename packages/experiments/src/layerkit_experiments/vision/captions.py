"""A small language model that writes captions of generated pictures, with a tower from scratch."""

from __future__ import annotations

from typing import Any, ClassVar

from layerkit.config import Config
from layerkit.layers import ImageEmbedding, RotaryPositionalEmbedding
from layerkit.models import LanguageModel
from layerkit_experiments.recipes.training import TrainedExperiment, train_config
from layerkit_experiments.vision.generated_scenes import (
    IMAGE_ID,
    IMAGE_SIZE,
    LENGTH_OF_CAPTION,
    GeneratedScenes,
    WordTokenizer,
)
from layerkit_runner.step.task import SingleTask


class Captions(TrainedExperiment):
    """Captions of two shapes, by a vision Transformer, a projector and a decoder from scratch."""

    tags: ClassVar[tuple[str, ...]] = ("vision",)

    MODEL_DIMS: int = 64
    """Size of the model dimension of tower and decoder."""
    TOWER_LAYERS: int = 2
    NUM_LAYERS: int = 2
    NUM_HEADS: int = 4
    PATCH_SIZE: int = 8
    """Height and width of a patch in pixels."""
    NUM_HELDOUT: int = 256
    """Number of pictures of an evaluation."""
    PERCORE_BATCH_SIZE: float = 32.0

    LEARNING_RATE = 3e-3
    ADAM_BETA2 = 0.98
    WEIGHT_DECAY = 1e-3
    WARMUP_STEPS = 30
    MAX_STEPS = 400
    EVAL_INTERVAL_STEPS = 200
    DECODE_INTERVAL_STEPS = 200
    CHECKPOINT_EVERY_N_STEPS = 200

    def data_summary(self) -> str:
        """Return a short description of the training data."""
        return "pictures of two shapes, generated"

    def datasets(self) -> list[Config]:
        """Return configs of the training and the held-out input."""
        return [
            self._scenes(name="train", is_training=True),
            self._scenes(name="heldout", num_examples=self.NUM_HELDOUT),
        ]

    def decode_datasets(self) -> list[Config]:
        """Return the config of the held-out pictures without captions."""
        return [self._scenes(name="captions", form="prompts", num_examples=self.NUM_HELDOUT)]

    def _scenes(self, **fields: Any) -> Config:
        return GeneratedScenes.HParams.config(
            percore_batch_size=self.PERCORE_BATCH_SIZE,
            tokens_per_image=(IMAGE_SIZE // self.PATCH_SIZE) ** 2,
            **fields,
        )

    def task(self) -> Config:
        """Return the config of the task."""
        sizes = {"model_dims": self.MODEL_DIMS, "hidden_dims": 4 * self.MODEL_DIMS}
        model = LanguageModel.HParams.config()
        model.decoder.set(
            temperature=0.0, max_decode_steps=LENGTH_OF_CAPTION, eos_id=WordTokenizer.eos_id
        )
        lm = model.lm_tpl.set(
            vocab_size=WordTokenizer.vocab_size, num_heads=self.NUM_HEADS, **sizes
        )
        lm.num_layers = self.NUM_LAYERS
        attention = lm.stack_tpl.layer_tpl.attention_tpl
        attention.rotary_tpl = RotaryPositionalEmbedding.HParams.config()
        lm.images_tpl = ImageEmbedding.HParams.config(token_id=IMAGE_ID)
        tower, rows = lm.images_tpl.tower_tpl, IMAGE_SIZE // self.PATCH_SIZE
        tower.set(num_layers=self.TOWER_LAYERS, num_heads=self.NUM_HEADS, **sizes)
        tower.position_grid = (rows, rows)
        tower.patch_tpl.patch_size = self.PATCH_SIZE
        return SingleTask.HParams.config(
            name="captions", model=model, train=train_config(self, self.learner())
        )
