"""Decoders on C4 for one TPU slice, with the values of Pax's c4.

The GPT-3 of 175 billion weights is MLPerf's benchmark of training, on its own data. Its runs end at
TARGET_LOSS.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from layerkit.config import Config
from layerkit_experiments.lm.pax import PaxLm
from layerkit_experiments.recipes.language_model import REDUCED_TEXT, LmExperiment
from layerkit_experiments.recipes.meshes import Pipelined
from layerkit_experiments.recipes.mlperf import mlperf_adamw, mlperf_readers
from layerkit_experiments.recipes.training import adamw_cosine
from layerkit_runner.optim.early_stopping import StopAtTarget


class C4Spmd(PaxLm, abstract=True):
    """Base of the decoders on C4."""

    DATA_FORMAT = "seqio"
    EVAL_NUM_BATCHES = 8
    EOS_ID = 1
    SUMMARY_INTERVAL_STEPS = 10
    CHECKPOINT_EVERY_N_STEPS = 1000

    unused_fields = ("OPTIMIZER", "DECAYED_WEIGHTS")
    reduced_fields: ClassVar[Mapping[str, Any]] = REDUCED_TEXT


class C4Spmd1BAdam4Replicas(C4Spmd):
    """A billion weights, fully sharded over 4 chips (v4:2x2x1)."""

    NUM_LAYERS = 13
    MODEL_DIMS = 2560
    HIDDEN_DIMS = 10240
    NUM_HEADS = 20
    DIMS_PER_HEAD = 128
    PERCORE_BATCH_SIZE = 32.0
    ICI_MESH_SHAPE = [1, 4, 1]


class C4Spmd1BAdam4ReplicasLimitSteps(C4Spmd):
    """The model of a billion weights for 15,000 steps."""

    tags = ("speed_test",)

    NUM_LAYERS = 13
    MODEL_DIMS = 2560
    HIDDEN_DIMS = 10240
    NUM_HEADS = 20
    DIMS_PER_HEAD = 128
    PERCORE_BATCH_SIZE = 32.0
    ICI_MESH_SHAPE = [1, 4, 1]
    MAX_STEPS = 15_000


class C4Spmd2BAdam4Replicas(C4Spmd):
    """2 billion weights, fully sharded over 4 chips (v4:2x2x1)."""

    NUM_LAYERS = 18
    MODEL_DIMS = 3072
    HIDDEN_DIMS = 12288
    NUM_HEADS = 24
    DIMS_PER_HEAD = 128
    PERCORE_BATCH_SIZE = 32.0
    ICI_MESH_SHAPE = [1, 4, 1]


class C4Spmd16BAdam32Replicas(C4Spmd):
    """16 billion weights, sharded by fsdp and tensor over 32 chips (v4:2x4x4)."""

    NUM_LAYERS = 36
    MODEL_DIMS = 6144
    HIDDEN_DIMS = 24576
    NUM_HEADS = 48
    DIMS_PER_HEAD = 128
    PERCORE_BATCH_SIZE = 16.0
    ICI_MESH_SHAPE = [1, 16, 2]


class C4Spmd32BAdam64Replicas(C4Spmd):
    """32 billion weights, sharded by fsdp and tensor over 64 chips (v4:4x4x4)."""

    NUM_LAYERS = 40
    MODEL_DIMS = 8192
    HIDDEN_DIMS = 32768
    NUM_HEADS = 64
    DIMS_PER_HEAD = 128
    PERCORE_BATCH_SIZE = 8.0
    ICI_MESH_SHAPE = [1, 16, 4]

    shards_features = True


class LmCloudSpmdAdam(PaxLm):
    """Two layers of 2048 dimensions, unrolled, on synthetic data and 8 chips (v4:2x2x2)."""

    NUM_LAYERS = 2
    MODEL_DIMS = 2048
    NUM_HEADS = 16
    DIMS_PER_HEAD = 128
    FPROP_DTYPE = "float32"
    USE_REPEATED_LAYER = False
    CHECKPOINT_POLICY = "none"
    PERCORE_BATCH_SIZE = 16.0
    LEARNING_RATE = 1e-3
    ICI_MESH_SHAPE = [1, 4, 2]


class LmCloudSpmdAdamLimitSteps(LmCloudSpmdAdam):
    """The two layers for 4000 steps, the warmup."""

    tags = ("speed_test",)

    MAX_STEPS = 4000
    SUMMARY_INTERVAL_STEPS = 100


class C4SpmdAdam(C4Spmd):
    """1.3 billion weights in unrolled layers on 8 chips (v4:2x2x2)."""

    NUM_LAYERS = 24
    MODEL_DIMS = 2048
    NUM_HEADS = 32
    DIMS_PER_HEAD = 64
    VOCAB_SIZE = 32128
    FPROP_DTYPE = "float32"
    USE_REPEATED_LAYER = False
    CHECKPOINT_POLICY = "none"
    PERCORE_BATCH_SIZE = 1.0
    SUMMARY_INTERVAL_STEPS = 100
    ICI_MESH_SHAPE = [1, 4, 2]


class C4SpmdPipelineAdam(Pipelined, PaxLm):
    """1.3 billion weights in two pipeline stages of 4 chips each (v4:2x2x2)."""

    DATA_FORMAT = "seqio"
    EVAL_NUM_BATCHES = 8
    EOS_ID = 1
    NUM_LAYERS = 24
    MODEL_DIMS = 2048
    NUM_HEADS = 32
    DIMS_PER_HEAD = 64
    VOCAB_SIZE = 32128
    FPROP_DTYPE = "float32"
    USE_REPEATED_LAYER = False
    CHECKPOINT_POLICY = "projections"
    PERCORE_BATCH_SIZE = 1.0
    NUM_STAGES = 2
    MICROBATCH_SIZE = 2
    SUMMARY_INTERVAL_STEPS = 100
    CHECKPOINT_EVERY_N_STEPS = 1000
    ICI_MESH_SHAPE = [2, 1, 2, 2]

    unused_fields = ("OPTIMIZER", "DECAYED_WEIGHTS")
    reduced_fields: ClassVar[Mapping[str, Any]] = REDUCED_TEXT


class C4SpmdPipelineGpt3Small(Pipelined, LmExperiment, abstract=True):
    """Base of the pipelined GPT-3 XL (Brown et al., 2020, arXiv:2005.14165)."""

    NUM_LAYERS = 24
    MODEL_DIMS = 3072
    HIDDEN_DIMS = 12288
    NUM_HEADS = 24
    DIMS_PER_HEAD = 128
    MAX_SEQ_LEN = 2048
    ACTIVATION = "gelu"
    POSITIONS = "trainable"
    MAX_POSITIONS = 16_384
    ATTENTION_BIAS = True
    FEED_FORWARD_BIAS = True
    NORM_EPSILON = 1e-5
    INIT_STD = 0.006
    CHECKPOINT_POLICY = "full"
    FPROP_DTYPE = "bfloat16"
    LEARNING_RATE = 2e-4
    DECAYED_WEIGHTS = "all"
    WARMUP_STEPS = 265
    DECAY_START = 266
    DECAY_END = 108_600
    MAX_STEPS = 108_600
    CHECKPOINT_EVERY_N_STEPS = 200

    reduced_fields: ClassVar[Mapping[str, Any]] = REDUCED_TEXT


class C4SpmdPipelineGpt3SmallAdam64Replicas(C4SpmdPipelineGpt3Small):
    """GPT-3 XL in four pipeline stages of 16 chips each (v4:4x4x4)."""

    VOCAB_SIZE = 50257
    PERCORE_BATCH_SIZE = 8.0
    NUM_STAGES = 4
    MICROBATCH_SIZE = 16
    ICI_MESH_SHAPE = [4, 1, 4, 4]
    SUMMARY_INTERVAL_STEPS = 1


class C4SpmdPipelineGpt3SmallAdam8Replicas(C4SpmdPipelineGpt3Small):
    """GPT-3 XL in two pipeline stages of 4 chips each (v4:2x2x2)."""

    VOCAB_SIZE = 51200
    PERCORE_BATCH_SIZE = 64.0
    NUM_STAGES = 2
    MICROBATCH_SIZE = 8
    ICI_MESH_SHAPE = [2, 1, 2, 2]
    SUMMARY_INTERVAL_STEPS = 5
    EVAL_INTERVAL_STEPS = 10
    CHECKPOINT_MAX_TO_KEEP = 1000


class MlperfGpt3(LmExperiment, abstract=True):
    """Base of GPT-3 175B on MLPerf's data, with MLPerf's schedule for the rows of a batch.

    Training ends when the held-out loss reaches a target.
    """

    TARGET_LOSS: float | None = 2.69
    """Loss of the held-out text, in nats per token, at which training ends; None for no target."""
    LEARNING_RATE: float | None = None  # type: ignore[assignment]
    """Peak learning rate. None: 2e-5 for batches of at most 3584 rows, 3e-5 for larger ones."""
    WARMUP_STEPS: int | float | None = None  # type: ignore[assignment]
    """Number of warmup steps. None: as many as read 265 * 1536 rows."""
    DECAY_END: int | float | None = None
    """Step at which the decay ends. None: the step that completes 108,600 * 1536 rows."""

    NUM_LAYERS = 96
    MODEL_DIMS = 12288
    HIDDEN_DIMS = 49152
    NUM_HEADS = 96
    DIMS_PER_HEAD = 128
    VOCAB_SIZE = 51200
    MAX_SEQ_LEN = 2048
    EVAL_NUM_BATCHES = None
    POSITIONS = "trainable"
    MAX_POSITIONS = 16_384
    ATTENTION_BIAS = True
    FEED_FORWARD_BIAS = True
    NORM_EPSILON = 1e-5
    SOFTMAX_CHUNK_SIZE = 512
    INIT_STD = 0.006
    CHECKPOINT_POLICY = "full"
    MAX_STEPS = 108_600
    SUMMARY_INTERVAL_STEPS = 1
    CHECKPOINT_MAX_TO_KEEP = 100

    unused_fields: ClassVar[tuple[str, ...]] = (
        "DECAYED_WEIGHTS",
        "DECAY_START",
        "LEARNING_RATE_SCHEDULE",
    )
    # Reduced runs train on bytes. Their loss falls below a target for tokens within a few steps.
    reduced_fields: ClassVar[Mapping[str, Any]] = {
        **REDUCED_TEXT,
        "TARGET_LOSS": None,
        "DECAY_END": 200,
    }
    tfds_name = "c4/en:3.0.4"
    eval_tfds_name: ClassVar[str] = "c4/en:3.0.5"
    eval_split = "validation_tokenized_5662seqs"
    shards_features = True
    readers = mlperf_readers
    learner = mlperf_adamw

    def task(self) -> Config:
        """Return the task with the rule that ends training."""
        task = super().task()
        if self.TARGET_LOSS is not None:
            task.early_stopping = Config(
                StopAtTarget, metric="heldout/xent", target=self.TARGET_LOSS
            )
        return task


class C4SpmdGpt3AdamOrgHP(MlperfGpt3, abstract=True):
    """Base of GPT-3 175B with the optimizer of the paper, for 1536 rows of 2048 tokens."""

    DECAYED_WEIGHTS = "all"
    DECAY_START = 266
    VOCAB_SIZE = 50257
    FPROP_DTYPE = "bfloat16"
    LEARNING_RATE = 6e-5
    WARMUP_STEPS = 265
    DECAY_END = 108_600
    CHECKPOINT_EVERY_N_STEPS = 100
    CHECKPOINT_MAX_TO_KEEP = 10
    SUMMARY_INTERVAL_STEPS = 10

    unused_fields = ()
    reduced_fields: ClassVar[Mapping[str, Any]] = {"DECAY_END": None}
    learner = adamw_cosine


class C4SpmdGpt3AdamOrgHPBS1p5k1536Replicas(C4SpmdGpt3AdamOrgHP):
    """GPT-3 175B in float32 with 1536 rows on 1536 chips (v4:8x12x16)."""

    VOCAB_SIZE = 51200
    FPROP_DTYPE = "float32"
    PERCORE_BATCH_SIZE = 1.0
    ICI_MESH_SHAPE = [1, 64, 24]
    SUMMARY_INTERVAL_STEPS = 1
    EVAL_INTERVAL_STEPS = 25
    CHECKPOINT_MAX_TO_KEEP = 100


class C4SpmdGpt3L16AdamOrgHP(C4SpmdGpt3AdamOrgHP):
    """16 of the 96 layers of GPT-3 175B on 64 chips (v4:4x4x4)."""

    NUM_LAYERS = 16
    PERCORE_BATCH_SIZE = 3.0
    ICI_MESH_SHAPE = [1, 16, 4]
    EVAL_INTERVAL_STEPS = 25_000


class C4SpmdPipelineGpt3AdamOrgHPBS1p5k768Replicas(Pipelined, MlperfGpt3):
    """GPT-3 175B, optimizer of the paper, 1536 rows, 8 stages of 96 chips (v5p:8x8x12).

    Pax's class misspells MICROBATCH_SIZE and has microbatches of 2 rows, fewer than the 8 devices
    of a stage that share a microbatch. Here they have the 8 rows of the misspelt field.
    """

    DECAYED_WEIGHTS = "all"
    DECAY_START = 266
    LEARNING_RATE = 6e-5
    WARMUP_STEPS = 265
    DECAY_END = 108_600
    PERCORE_BATCH_SIZE = 2.0
    NUM_STAGES = 8
    MICROBATCH_SIZE = 8
    ICI_MESH_SHAPE = [8, 1, 8, 12]
    EVAL_INTERVAL_STEPS = 25
    CHECKPOINT_EVERY_N_STEPS = 50

    unused_fields = ()
    learner = adamw_cosine


class C4SpmdPipelineGpt3AdamMLPerfHPBS1p5k768Replicas(Pipelined, MlperfGpt3):
    """GPT-3 175B of MLPerf, 1536 rows, 8 stages of 96 chips (v5p:8x8x12)."""

    PERCORE_BATCH_SIZE = 2.0
    NUM_STAGES = 8
    MICROBATCH_SIZE = 8
    ICI_MESH_SHAPE = [8, 1, 8, 12]
    EVAL_INTERVAL_STEPS = 16
    CHECKPOINT_EVERY_N_STEPS = 32


class C4SpmdPipelineGpt3AdamMLPerfHPBS2k512Replicas(Pipelined, MlperfGpt3):
    """GPT-3 175B of MLPerf, 2048 rows, 8 stages of 64 chips (v5p:8x8x8)."""

    PERCORE_BATCH_SIZE = 4.0
    NUM_STAGES = 8
    MICROBATCH_SIZE = 8
    ICI_MESH_SHAPE = [8, 1, 8, 8]
    EVAL_INTERVAL_STEPS = 12
    CHECKPOINT_EVERY_N_STEPS = 24


class C4SpmdPipelineGpt3AdamMLPerfHPBS3k768Replicas(Pipelined, MlperfGpt3):
    """GPT-3 175B of MLPerf, 3072 rows, 4 stages of 192 chips (v5p:8x8x12)."""

    PERCORE_BATCH_SIZE = 4.0
    NUM_STAGES = 4
    MICROBATCH_SIZE = 16
    ICI_MESH_SHAPE = [4, 1, 16, 12]
    EVAL_INTERVAL_STEPS = 8
    CHECKPOINT_EVERY_N_STEPS = 16


class C4SpmdPipelineGpt3AdamMLPerfHPBS4k1024Replicas(Pipelined, MlperfGpt3):
    """GPT-3 175B of MLPerf, 4096 rows, 8 stages of 128 chips (v5p:8x8x16)."""

    PERCORE_BATCH_SIZE = 4.0
    NUM_STAGES = 8
    MICROBATCH_SIZE = 8
    ICI_MESH_SHAPE = [8, 1, 8, 16]
    EVAL_INTERVAL_STEPS = 6
    CHECKPOINT_EVERY_N_STEPS = 12


class C4SpmdPipelineGpt3AdamMLPerfHPBS8k1024Replicas(Pipelined, MlperfGpt3):
    """GPT-3 175B of MLPerf, 8192 rows, 4 stages of 256 chips (v5p:8x8x16)."""

    PERCORE_BATCH_SIZE = 8.0
    NUM_STAGES = 4
    MICROBATCH_SIZE = 16
    ICI_MESH_SHAPE = [4, 1, 16, 16]
    EVAL_INTERVAL_STEPS = 3
    CHECKPOINT_EVERY_N_STEPS = 6
