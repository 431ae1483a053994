"""Smoke and speed tests on synthetic data, with the values of Pax's lm_cloud."""

from __future__ import annotations

from layerkit_experiments.lm.recipes.data import SyntheticTokens
from layerkit_experiments.lm.recipes.decoders import CappedDecoder, PaxDecoder
from layerkit_experiments.lm.recipes.optimization import AdamExponential
from layerkit_experiments.lm.recipes.parallelism import Pmap, Spmd


class LmCloudSpmd(AdamExponential, Spmd, SyntheticTokens, CappedDecoder, abstract=True):
    """Base of the SPMD experiments on synthetic data.

    Pax's tokens are all 1. These can be learned, and a held-out batch measures how well. A run ends
    after MAX_STEPS, the end of the decay, where Pax's goes on to ten million steps.
    """

    LEARNING_RATE = 2.5e-4


class LmCloudSpmdTest(LmCloudSpmd):
    """A tiny model on one device, as a smoke test of 10 steps, each of which is reported."""

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
    ICI_MESH_SHAPE = [1, 4, 1]


class LmCloudSpmd2BLimitSteps(LmCloudSpmd2B):
    """The 2B model for 300 steps."""

    MAX_STEPS = 300


class LmCloudTransformerAdam(AdamExponential, Pmap, SyntheticTokens, PaxDecoder):
    """A 32-layer model under pmap: the whole state on every device."""

    NUM_LAYERS = 32
    MODEL_DIMS = 1024
    HIDDEN_DIMS = 4096
    NUM_HEADS = 16
    DIMS_PER_HEAD = 64
    PERCORE_BATCH_SIZE = 16.0
    ACTIVATION = "relu"
    USE_REPEATED_LAYER = False


class LmCloudTransformerAdamLimitSteps(LmCloudTransformerAdam):
    """The pmap model with 10 layers, for 2000 steps."""

    NUM_LAYERS = 10
    MAX_STEPS = 2000
