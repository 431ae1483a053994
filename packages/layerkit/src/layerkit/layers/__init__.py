"""The layers. This is the index; each family has a module of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from layerkit.lazy_names import lazy_names

if TYPE_CHECKING:
    from layerkit.layers.activations import ELU as ELU
    from layerkit.layers.activations import GELU as GELU
    from layerkit.layers.activations import BaseActivation as BaseActivation
    from layerkit.layers.activations import CubedReLU as CubedReLU
    from layerkit.layers.activations import Exp as Exp
    from layerkit.layers.activations import Identity as Identity
    from layerkit.layers.activations import LeakyReLU as LeakyReLU
    from layerkit.layers.activations import ReLU as ReLU
    from layerkit.layers.activations import ReLU6 as ReLU6
    from layerkit.layers.activations import Sigmoid as Sigmoid
    from layerkit.layers.activations import SiLU as SiLU
    from layerkit.layers.activations import SineOfReLU as SineOfReLU
    from layerkit.layers.activations import SineReLU as SineReLU
    from layerkit.layers.activations import Softplus as Softplus
    from layerkit.layers.activations import SquaredReLU as SquaredReLU
    from layerkit.layers.activations import Tanh as Tanh
    from layerkit.layers.adapters import merge_lora as merge_lora
    from layerkit.layers.adapters import unmerge_lora as unmerge_lora
    from layerkit.layers.adapters import with_lora as with_lora
    from layerkit.layers.adapters import without_lora as without_lora
    from layerkit.layers.attention.biases import Alibi as Alibi
    from layerkit.layers.attention.biases import RelativeBias as RelativeBias
    from layerkit.layers.attention.cross import CrossAttention as CrossAttention
    from layerkit.layers.attention.latent import (
        MultiHeadLatentAttention as MultiHeadLatentAttention,
    )
    from layerkit.layers.attention.multi_head import MultiHeadAttention as MultiHeadAttention
    from layerkit.layers.attention.projections import HeadProjection as HeadProjection
    from layerkit.layers.attention.projections import OutputProjection as OutputProjection
    from layerkit.layers.batch_statistics import BatchNorm as BatchNorm
    from layerkit.layers.batch_statistics import GroupNorm as GroupNorm
    from layerkit.layers.composition import MLPBlock as MLPBlock
    from layerkit.layers.composition import Sequential as Sequential
    from layerkit.layers.composition import StackingOverTime as StackingOverTime
    from layerkit.layers.einsum import Einsum as Einsum
    from layerkit.layers.embeddings import Embedding as Embedding
    from layerkit.layers.embeddings import FullSoftmax as FullSoftmax
    from layerkit.layers.embeddings import SharedEmbeddingSoftmax as SharedEmbeddingSoftmax
    from layerkit.layers.feed_forward import TransformerFeedForward as TransformerFeedForward
    from layerkit.layers.flax_module import FlaxModule as FlaxModule
    from layerkit.layers.linears import Bias as Bias
    from layerkit.layers.linears import FeedForward as FeedForward
    from layerkit.layers.linears import Linear as Linear
    from layerkit.layers.masked_lm import MaskedLmAugmenter as MaskedLmAugmenter
    from layerkit.layers.masks import AttentionMask as AttentionMask
    from layerkit.layers.moe.feed_forward import MoeFeedForward as MoeFeedForward
    from layerkit.layers.moe.routing import BaseRouter as BaseRouter
    from layerkit.layers.moe.routing import ExpertChoiceRouter as ExpertChoiceRouter
    from layerkit.layers.moe.routing import TopKRouter as TopKRouter
    from layerkit.layers.normalizations import BaseNormalization as BaseNormalization
    from layerkit.layers.normalizations import LayerNorm as LayerNorm
    from layerkit.layers.normalizations import RmsNorm as RmsNorm
    from layerkit.layers.normalizations import RmsNormNoScale as RmsNormNoScale
    from layerkit.layers.pipeline import Pipeline as Pipeline
    from layerkit.layers.pipelined_transformer import PipelinedTransformer as PipelinedTransformer
    from layerkit.layers.positions import PositionalEmbedding as PositionalEmbedding
    from layerkit.layers.positions import PositionalEmbedding2D as PositionalEmbedding2D
    from layerkit.layers.positions import RotaryPositionalEmbedding as RotaryPositionalEmbedding
    from layerkit.layers.positions import (
        TrainablePositionalEmbedding as TrainablePositionalEmbedding,
    )
    from layerkit.layers.products import Dot as Dot
    from layerkit.layers.products import with_dots as with_dots
    from layerkit.layers.quantization.current_scaling import Fp8CurrentDot as Fp8CurrentDot
    from layerkit.layers.quantization.current_scaling import Int8Dot as Int8Dot
    from layerkit.layers.quantization.fp8 import Fp8Dot as Fp8Dot
    from layerkit.layers.quantization.mxfp8 import MxFp8Dot as MxFp8Dot
    from layerkit.layers.quantization.nvfp4 import NvFp4Dot as NvFp4Dot
    from layerkit.layers.quantization.stored_weights import dequantize_model as dequantize_model
    from layerkit.layers.quantization.stored_weights import quantize_model as quantize_model
    from layerkit.layers.repeat import Repeat as Repeat
    from layerkit.layers.residual_adapters import AdaptedFeedForward as AdaptedFeedForward
    from layerkit.layers.residual_adapters import AdaptedOutputProjection as AdaptedOutputProjection
    from layerkit.layers.residual_adapters import (
        MultitaskResidualAdapter as MultitaskResidualAdapter,
    )
    from layerkit.layers.residual_adapters import ResidualAdapter as ResidualAdapter
    from layerkit.layers.rotary_scaling import LinearScaling as LinearScaling
    from layerkit.layers.rotary_scaling import Llama3Scaling as Llama3Scaling
    from layerkit.layers.rotary_scaling import LongRopeScaling as LongRopeScaling
    from layerkit.layers.rotary_scaling import NtkScaling as NtkScaling
    from layerkit.layers.rotary_scaling import YarnScaling as YarnScaling
    from layerkit.layers.sigmoid_cross_entropy import SigmoidCrossEntropy as SigmoidCrossEntropy
    from layerkit.layers.stacks import StackedTransformer as StackedTransformer
    from layerkit.layers.stacks import StackedTransformerRepeated as StackedTransformerRepeated
    from layerkit.layers.stochastic import Dropout as Dropout
    from layerkit.layers.stochastic import StochasticResidual as StochasticResidual
    from layerkit.layers.transformer import Transformer as Transformer

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "activations": (
            "ELU GELU BaseActivation CubedReLU Exp Identity LeakyReLU ReLU "
            "ReLU6 Sigmoid SiLU SineOfReLU SineReLU Softplus SquaredReLU Tanh"
        ),
        "adapters": "merge_lora unmerge_lora with_lora without_lora",
        "attention.biases": "Alibi RelativeBias",
        "attention.cross": "CrossAttention",
        "attention.latent": "MultiHeadLatentAttention",
        "attention.multi_head": "MultiHeadAttention",
        "attention.projections": "HeadProjection OutputProjection",
        "batch_statistics": "BatchNorm GroupNorm",
        "composition": "MLPBlock Sequential StackingOverTime",
        "einsum": "Einsum",
        "embeddings": "Embedding FullSoftmax SharedEmbeddingSoftmax",
        "feed_forward": "TransformerFeedForward",
        "flax_module": "FlaxModule",
        "linears": "Bias FeedForward Linear",
        "masked_lm": "MaskedLmAugmenter",
        "masks": "AttentionMask",
        "moe.feed_forward": "MoeFeedForward",
        "moe.routing": "BaseRouter ExpertChoiceRouter TopKRouter",
        "normalizations": "BaseNormalization LayerNorm RmsNorm RmsNormNoScale",
        "pipeline": "Pipeline",
        "pipelined_transformer": "PipelinedTransformer",
        "positions": (
            "PositionalEmbedding PositionalEmbedding2D "
            "RotaryPositionalEmbedding TrainablePositionalEmbedding"
        ),
        "products": "Dot with_dots",
        "quantization.mxfp8": "MxFp8Dot",
        "quantization.nvfp4": "NvFp4Dot",
        "quantization.current_scaling": "Fp8CurrentDot Int8Dot",
        "quantization.fp8": "Fp8Dot",
        "quantization.stored_weights": "dequantize_model quantize_model",
        "repeat": "Repeat",
        "residual_adapters": (
            "AdaptedFeedForward AdaptedOutputProjection MultitaskResidualAdapter ResidualAdapter"
        ),
        "rotary_scaling": "LinearScaling Llama3Scaling LongRopeScaling NtkScaling YarnScaling",
        "sigmoid_cross_entropy": "SigmoidCrossEntropy",
        "stacks": "StackedTransformer StackedTransformerRepeated",
        "stochastic": "Dropout StochasticResidual",
        "transformer": "Transformer",
    },
)
