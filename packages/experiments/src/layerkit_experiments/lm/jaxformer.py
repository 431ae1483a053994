"""A small model with latent attention, experts, and data × pipeline × tensor parallelism.

Jaxformer (https://jaxformer.com) is a guide that builds such a model and trains a billion weights,
300 million active per token, on 32 v4 chips: data 8, two pipeline stages, tensor 2. Sizes and
schedule are the defaults of its published code. Unlike that code, this class does not shard weights
over the data axis, which this size does not need. The guide describes the gate as noisy top-k.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from layerkit.config import Config
from layerkit_experiments.recipes.experts import MixtureOfExperts, add_experts
from layerkit_experiments.recipes.language_model import REDUCED_TEXT, LmExperiment, decoder
from layerkit_experiments.recipes.latent_attention import use_latent_attention
from layerkit_experiments.recipes.meshes import Pipelined


class Jaxformer1B(MixtureOfExperts, Pipelined, LmExperiment):
    """Latent attention, 8 + 2 experts, noisy top-2, in a pipeline on 32 chips (v4:2x4x4)."""

    LATENT_DIMS: int = 64
    """Size of the latent of keys and values, which the cache holds."""
    QUERY_LATENT_DIMS: int | None = 64
    """Size of the latent of queries; None projects queries from the inputs."""
    PLAIN_DIMS_PER_HEAD: int = 64
    """Coordinates of queries and keys without position, and the size of values."""
    ROTARY_DIMS_PER_HEAD: int = 64
    """Rotated coordinates of queries and keys."""

    NUM_LAYERS = 16
    MODEL_DIMS = 768
    HIDDEN_DIMS = 3072
    NUM_HEADS = 12
    POSITIONS = "none"
    NORM = "rms_norm"
    VOCAB_SIZE = 100_277
    MAX_SEQ_LEN = 1024
    NUM_EXPERTS = 8
    NUM_SHARED_EXPERTS = 2
    CAPACITY_FACTOR = 1.5
    ROUTER_NOISE = True
    LOAD_BALANCE_WEIGHT = 1e-4
    FPROP_DTYPE = "bfloat16"
    CHECKPOINT_POLICY = "full"
    NUM_STAGES = 2
    NUM_MICROBATCHES = 8
    PERCORE_BATCH_SIZE = 16.0
    ICI_MESH_SHAPE = [2, 8, 1, 2]  # stage, data, fsdp, tensor
    LEARNING_RATE = 4e-3
    MIN_LEARNING_RATE_RATIO = 0.01
    WEIGHT_DECAY = 1e-4
    WARMUP_STEPS = 2000
    DECAY_END = 15_000
    MAX_STEPS = 20_000
    PROMPTS_PER_DEVICE = 2.0
    DECODE_INTERVAL_STEPS = 1000

    reduced_fields: ClassVar[Mapping[str, Any]] = {
        **REDUCED_TEXT,
        "LATENT_DIMS": 16,
        "QUERY_LATENT_DIMS": None,
        "PLAIN_DIMS_PER_HEAD": 8,
        "ROTARY_DIMS_PER_HEAD": 8,
        "DIMS_PER_HEAD": None,
    }

    def model(self) -> Config:
        """Return the config of the LanguageModel."""
        return add_experts(self, use_latent_attention(self, decoder(self)))

    def task(self) -> Config:
        """Return the task; it saves the first weights, and samples with the same random numbers."""
        task = super().task()
        task.train.save_step_zero = True
        task.train.decode_random_seed = self.SEED
        return task
