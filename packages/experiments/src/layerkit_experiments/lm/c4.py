"""Decoders on C4 for one TPU slice, with the values of Pax's c4."""

from __future__ import annotations

from layerkit_experiments.lm.recipes.corpora import C4
from layerkit_experiments.lm.recipes.decoders import CappedDecoder, Gpt3Decoder, Gpt3Schedule
from layerkit_experiments.lm.recipes.optimization import AdamExponential
from layerkit_experiments.lm.recipes.parallelism import Pipelined, Spmd


class C4SpmdAdam(AdamExponential, Spmd, C4, CappedDecoder, abstract=True):
    """Base of the decoders on C4."""

    SUMMARY_INTERVAL_STEPS = 10
    CHECKPOINT_EVERY_N_STEPS = 1000


class C4Spmd1BAdam4Replicas(C4SpmdAdam):
    """A billion weights, fully sharded over 4 chips (v4:2x2x1)."""

    NUM_LAYERS = 13
    MODEL_DIMS = 2560
    HIDDEN_DIMS = 10240
    NUM_HEADS = 20
    DIMS_PER_HEAD = 128
    VOCAB_SIZE = 32000
    MAX_SEQ_LEN = 1024
    PERCORE_BATCH_SIZE = 32.0
    ICI_MESH_SHAPE = [1, 4, 1]


class C4Spmd16BAdam32Replicas(C4SpmdAdam):
    """16 billion weights, sharded by fsdp and tensor over 32 chips (v4:2x4x4)."""

    NUM_LAYERS = 36
    MODEL_DIMS = 6144
    HIDDEN_DIMS = 24576
    NUM_HEADS = 48
    DIMS_PER_HEAD = 128
    VOCAB_SIZE = 32000
    MAX_SEQ_LEN = 1024
    PERCORE_BATCH_SIZE = 16.0
    ICI_MESH_SHAPE = [1, 16, 2]


class C4SpmdPipelineGpt3Small(Gpt3Schedule, Pipelined, C4, Gpt3Decoder, abstract=True):
    """Base of the pipelined GPT-3 XL."""

    NUM_LAYERS = 24
    MODEL_DIMS = 3072
    HIDDEN_DIMS = 12288
    NUM_HEADS = 24
    DIMS_PER_HEAD = 128
    MAX_SEQ_LEN = 2048
    MAX_POSITIONS = 16_384
    SOFTMAX_CHUNK_SIZE = 512
    INIT_STD = 0.006
    CHECKPOINT_POLICY = "full"
    LEARNING_RATE = 2e-4
    WARMUP_STEPS = 265
    DECAY_START = 266
    DECAY_END = 108_600
    MAX_STEPS = 108_600
    CHECKPOINT_EVERY_N_STEPS = 200


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
