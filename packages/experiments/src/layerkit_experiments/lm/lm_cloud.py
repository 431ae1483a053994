"""Smoke and speed tests on synthetic data, with the values of Pax's lm_cloud."""

from __future__ import annotations

from layerkit_experiments.lm.recipes.data import SyntheticTokens
from layerkit_experiments.lm.recipes.decoders import CappedDecoder
from layerkit_experiments.lm.recipes.experiment import LmExperiment
from layerkit_experiments.lm.recipes.optimization import AdamExponential
from layerkit_experiments.lm.recipes.parallelism import Pmap, Spmd


class LmCloudSpmd(AdamExponential, Spmd, SyntheticTokens, CappedDecoder, abstract=True):
    """Base of the SPMD experiments on synthetic data."""

    EVAL_INTERVAL_STEPS = None


class LmCloudSpmdTest(LmCloudSpmd):
    """A tiny model on one device, as a smoke test."""

    NUM_LAYERS = 2
    MODEL_DIMS = 64
    HIDDEN_DIMS = 256
    NUM_HEADS = 8
    DIMS_PER_HEAD = 8
    PERCORE_BATCH_SIZE = 4.0
    ICI_MESH_SHAPE = [1, 1, 1]
    MAX_STEPS = 10
    SUMMARY_INTERVAL_STEPS = 1


class LmCloudSpmd2B(LmCloudSpmd):
    """2 billion parameters, fully sharded over 4 devices."""

    NUM_LAYERS = 18
    MODEL_DIMS = 3072
    HIDDEN_DIMS = 12288
    NUM_HEADS = 24
    DIMS_PER_HEAD = 128
    PERCORE_BATCH_SIZE = 8.0
    LEARNING_RATE = 2.5e-4
    ICI_MESH_SHAPE = [1, 4, 1]
    SUMMARY_INTERVAL_STEPS = 10


class LmCloudSpmd2BLimitSteps(LmCloudSpmd2B):
    """The 2B model for 300 steps."""

    MAX_STEPS = 300


class LmCloudTransformerAdam(AdamExponential, Pmap, SyntheticTokens, LmExperiment):
    """A 10-layer model under pmap: the whole state on every device."""

    NUM_LAYERS = 10
    MODEL_DIMS = 1024
    HIDDEN_DIMS = 4096
    NUM_HEADS = 16
    DIMS_PER_HEAD = 64
    PERCORE_BATCH_SIZE = 16.0
    ACTIVATION = "relu"
    ATTENTION_LOGIT_CAP = 50.0
    SCALE_EMBEDDING = True
    USE_REPEATED_LAYER = False
    EVAL_INTERVAL_STEPS = None


class LmCloudTransformerAdamLimitSteps(LmCloudTransformerAdam):
    """The pmap model for 2000 steps."""

    MAX_STEPS = 2000
