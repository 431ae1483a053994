"""The layers. This is the index; each family has a module of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from layerkit.config.lazy_names import lazy_names

if TYPE_CHECKING:
    from layerkit.layers.attention.base_attention import HeadProjection as HeadProjection
    from layerkit.layers.attention.base_attention import OutputProjection as OutputProjection
    from layerkit.layers.attention.biases import Alibi as Alibi
    from layerkit.layers.attention.biases import RelativeBias as RelativeBias
    from layerkit.layers.attention.cross import CrossAttention as CrossAttention
    from layerkit.layers.attention.latent import (
        MultiHeadLatentAttention as MultiHeadLatentAttention,
    )
    from layerkit.layers.attention.multi_head import MultiHeadAttention as MultiHeadAttention
    from layerkit.layers.attention.transformer_xl import (
        TransformerXLAttention as TransformerXLAttention,
    )
    from layerkit.layers.basic.batch_norm import BatchNorm as BatchNorm
    from layerkit.layers.basic.batch_norm import GroupNorm as GroupNorm
    from layerkit.layers.basic.dots import Dot as Dot
    from layerkit.layers.basic.dots import replace_dots as replace_dots
    from layerkit.layers.basic.einsum import Einsum as Einsum
    from layerkit.layers.basic.elementwise import ELU as ELU
    from layerkit.layers.basic.elementwise import GELU as GELU
    from layerkit.layers.basic.elementwise import BaseActivation as BaseActivation
    from layerkit.layers.basic.elementwise import CubedReLU as CubedReLU
    from layerkit.layers.basic.elementwise import Dropout as Dropout
    from layerkit.layers.basic.elementwise import Exp as Exp
    from layerkit.layers.basic.elementwise import Identity as Identity
    from layerkit.layers.basic.elementwise import LeakyReLU as LeakyReLU
    from layerkit.layers.basic.elementwise import ReLU as ReLU
    from layerkit.layers.basic.elementwise import ReLU6 as ReLU6
    from layerkit.layers.basic.elementwise import Sigmoid as Sigmoid
    from layerkit.layers.basic.elementwise import SiLU as SiLU
    from layerkit.layers.basic.elementwise import SineOfReLU as SineOfReLU
    from layerkit.layers.basic.elementwise import Softplus as Softplus
    from layerkit.layers.basic.elementwise import SquaredReLU as SquaredReLU
    from layerkit.layers.basic.elementwise import StochasticResidual as StochasticResidual
    from layerkit.layers.basic.elementwise import Tanh as Tanh
    from layerkit.layers.basic.embeddings import Embedding as Embedding
    from layerkit.layers.basic.embeddings import FullSoftmax as FullSoftmax
    from layerkit.layers.basic.embeddings import SharedEmbeddingSoftmax as SharedEmbeddingSoftmax
    from layerkit.layers.basic.flax_module import FlaxModule as FlaxModule
    from layerkit.layers.basic.linears import Bias as Bias
    from layerkit.layers.basic.linears import FeedForward as FeedForward
    from layerkit.layers.basic.linears import Linear as Linear
    from layerkit.layers.basic.linears import NormalizedFeedForward as NormalizedFeedForward
    from layerkit.layers.basic.masked_lm_augmenter import MaskedLmAugmenter as MaskedLmAugmenter
    from layerkit.layers.basic.normalizations import BaseNormalization as BaseNormalization
    from layerkit.layers.basic.normalizations import IdentityNorm as IdentityNorm
    from layerkit.layers.basic.normalizations import LayerNorm as LayerNorm
    from layerkit.layers.basic.normalizations import LayerNormPerHead as LayerNormPerHead
    from layerkit.layers.basic.normalizations import RmsNorm as RmsNorm
    from layerkit.layers.basic.normalizations import RmsNormNoScale as RmsNormNoScale
    from layerkit.layers.basic.positions import PositionalEmbedding as PositionalEmbedding
    from layerkit.layers.basic.positions import PositionalEmbedding2D as PositionalEmbedding2D
    from layerkit.layers.basic.positions import (
        RotaryPositionalEmbedding as RotaryPositionalEmbedding,
    )
    from layerkit.layers.basic.positions import (
        TrainablePositionalEmbedding as TrainablePositionalEmbedding,
    )
    from layerkit.layers.basic.sequential import MLPBlock as MLPBlock
    from layerkit.layers.basic.sequential import Sequential as Sequential
    from layerkit.layers.basic.sequential import StackingOverTime as StackingOverTime
    from layerkit.layers.basic.sigmoid_cross_entropy import (
        SigmoidCrossEntropy as SigmoidCrossEntropy,
    )
    from layerkit.layers.basic.vector_quantizers import BaseVectorQuantizer as BaseVectorQuantizer
    from layerkit.layers.basic.vector_quantizers import (
        RandomVectorQuantizer as RandomVectorQuantizer,
    )
    from layerkit.layers.basic.vector_quantizers import VectorQuantizer as VectorQuantizer
    from layerkit.layers.moe.expert_choice import ExpertChoiceFeedForward as ExpertChoiceFeedForward
    from layerkit.layers.moe.normalized import NormalizedMoeFeedForward as NormalizedMoeFeedForward
    from layerkit.layers.moe.normalized import NormalizedRouter as NormalizedRouter
    from layerkit.layers.moe.routing import BaseRouter as BaseRouter
    from layerkit.layers.moe.routing import ExpertChoiceRouter as ExpertChoiceRouter
    from layerkit.layers.moe.routing import TopKRouter as TopKRouter
    from layerkit.layers.moe.token_choice import MoeFeedForward as MoeFeedForward
    from layerkit.layers.quantization.current_scaling import Fp8CurrentDot as Fp8CurrentDot
    from layerkit.layers.quantization.current_scaling import Int8Dot as Int8Dot
    from layerkit.layers.quantization.fp8 import Fp8Dot as Fp8Dot
    from layerkit.layers.quantization.lora import LORA_WEIGHTS as LORA_WEIGHTS
    from layerkit.layers.quantization.lora import add_lora as add_lora
    from layerkit.layers.quantization.lora import merge_lora as merge_lora
    from layerkit.layers.quantization.lora import remove_lora as remove_lora
    from layerkit.layers.quantization.mxfp8 import MxFp8Dot as MxFp8Dot
    from layerkit.layers.quantization.nvfp4 import NvFp4Dot as NvFp4Dot
    from layerkit.layers.quantization.stored_weights import dequantize_model as dequantize_model
    from layerkit.layers.quantization.stored_weights import quantize_model as quantize_model
    from layerkit.layers.recurrent.cells import BaseRnnCell as BaseRnnCell
    from layerkit.layers.recurrent.cells import GruCell as GruCell
    from layerkit.layers.recurrent.cells import LstmCell as LstmCell
    from layerkit.layers.recurrent.frnn import Frnn as Frnn
    from layerkit.layers.recurrent.frnn import StackedFrnn as StackedFrnn
    from layerkit.layers.recurrent.linear_attention import GatedDeltaNet as GatedDeltaNet
    from layerkit.layers.recurrent.linear_attention import KimiDeltaAttention as KimiDeltaAttention
    from layerkit.layers.recurrent.linear_attention import LinearAttention as LinearAttention
    from layerkit.layers.recurrent.linear_attention import Mamba2 as Mamba2
    from layerkit.layers.recurrent.mixer_parts import CausalConvolution as CausalConvolution
    from layerkit.layers.recurrent.mixer_parts import GatedNorm as GatedNorm
    from layerkit.layers.recurrent.mixer_parts import TimeSteps as TimeSteps
    from layerkit.layers.recurrent.parallel_mixers import ParallelMixers as ParallelMixers
    from layerkit.layers.recurrent.short_convolution import ShortConvolution as ShortConvolution
    from layerkit.layers.recurrent.state_space import S4D as S4D
    from layerkit.layers.recurrent.state_space import S5 as S5
    from layerkit.layers.recurrent.state_space import StateSpace as StateSpace
    from layerkit.layers.recurrent.token_mixer import TokenMixer as TokenMixer
    from layerkit.layers.speech.conformer import Conformer as Conformer
    from layerkit.layers.speech.conformer import ConformerEncoder as ConformerEncoder
    from layerkit.layers.speech.conformer import LightConv1D as LightConv1D
    from layerkit.layers.speech.log_mel import LogMel as LogMel
    from layerkit.layers.speech.spectrum_augmenter import SpectrumAugmenter as SpectrumAugmenter
    from layerkit.layers.speech.transformer_encoder import (
        SpeechTransformerEncoder as SpeechTransformerEncoder,
    )
    from layerkit.layers.transformer.layer_inputs import GatedInput as GatedInput
    from layerkit.layers.transformer.layer_inputs import LayerInputs as LayerInputs
    from layerkit.layers.transformer.multi_token import MultiTokenModule as MultiTokenModule
    from layerkit.layers.transformer.multi_token import MultiTokenPrediction as MultiTokenPrediction
    from layerkit.layers.transformer.ngrammer import NGrammer as NGrammer
    from layerkit.layers.transformer.pipeline import Pipeline as Pipeline
    from layerkit.layers.transformer.pipelined_transformer import (
        PipelinedTransformer as PipelinedTransformer,
    )
    from layerkit.layers.transformer.repeat import Repeat as Repeat
    from layerkit.layers.transformer.residual_adapters import (
        AdaptedFeedForward as AdaptedFeedForward,
    )
    from layerkit.layers.transformer.residual_adapters import (
        AdaptedOutputProjection as AdaptedOutputProjection,
    )
    from layerkit.layers.transformer.residual_adapters import (
        MultitaskResidualAdapter as MultitaskResidualAdapter,
    )
    from layerkit.layers.transformer.residual_adapters import ResidualAdapter as ResidualAdapter
    from layerkit.layers.transformer.stacks import StackedTransformer as StackedTransformer
    from layerkit.layers.transformer.stacks import (
        StackedTransformerRepeated as StackedTransformerRepeated,
    )
    from layerkit.layers.transformer.transformer import Transformer as Transformer
    from layerkit.layers.transformer.transformer import (
        TransformerFeedForward as TransformerFeedForward,
    )
    from layerkit.layers.vision.contrastive import ContrastiveLoss as ContrastiveLoss
    from layerkit.layers.vision.convolutions import Conv as Conv
    from layerkit.layers.vision.convolutions import ConvBNAct as ConvBNAct
    from layerkit.layers.vision.convolutions import ConvTranspose as ConvTranspose
    from layerkit.layers.vision.image_embedding import ImageEmbedding as ImageEmbedding
    from layerkit.layers.vision.image_embedding import ImageProjector as ImageProjector
    from layerkit.layers.vision.poolings import GlobalPooling as GlobalPooling
    from layerkit.layers.vision.poolings import Pooling as Pooling
    from layerkit.layers.vision.resnets import ResNet as ResNet
    from layerkit.layers.vision.resnets import ResNetBasicBlock as ResNetBasicBlock
    from layerkit.layers.vision.resnets import ResNetBlock as ResNetBlock
    from layerkit.layers.vision.resnets import resnet as resnet
    from layerkit.layers.vision.vision_transformer import AttentionPooling as AttentionPooling
    from layerkit.layers.vision.vision_transformer import PatchEmbedding as PatchEmbedding
    from layerkit.layers.vision.vision_transformer import VisionTransformer as VisionTransformer
    from layerkit.ops.attention.dot_product import AttentionOptions as AttentionOptions
    from layerkit.ops.attention.masks import AttentionMask as AttentionMask
    from layerkit.ops.pipeline_schedule import bubble_fraction as bubble_fraction
    from layerkit.ops.rotary_scaling import LinearScaling as LinearScaling
    from layerkit.ops.rotary_scaling import Llama3Scaling as Llama3Scaling
    from layerkit.ops.rotary_scaling import LongRopeScaling as LongRopeScaling
    from layerkit.ops.rotary_scaling import NtkScaling as NtkScaling
    from layerkit.ops.rotary_scaling import ProportionalScaling as ProportionalScaling
    from layerkit.ops.rotary_scaling import YarnScaling as YarnScaling

__getattr__, __dir__, __all__ = lazy_names(__name__)
