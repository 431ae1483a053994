"""Residual networks for images (He et al., 2015, arXiv:1512.03385), with the details of Praxis.

The stride of a bottleneck block is that of its middle convolution ("v1.5"). The weights of
torchvision fit with `entry_pool_tpl.padding="EVEN"` and an `epsilon` of 1e-5 of the norms, whose
scales are stored without the 1.
"""

from __future__ import annotations

from typing import Any, ClassVar

import jax

from layerkit.base.base_layer import BaseLayer
from layerkit.base.weights import WeightInit
from layerkit.config import Config, sub_config_field, target_of
from layerkit.config.checks import check_choice, check_divisible, require
from layerkit.layers.basic.batch_norm import BatchNorm
from layerkit.layers.basic.elementwise import BaseActivation, Identity, ReLU, StochasticResidual
from layerkit.layers.vision.convolutions import ConvBNAct
from layerkit.layers.vision.poolings import Pooling

_CONV: Any = {
    "padding": "EVEN",
    "activation_axes": ("batch", None, None, "act_mlp"),
    "weight_init": WeightInit.FanOut(1.4141),
    "batch_norm_tpl": BatchNorm.HParams.config(decay=0.9),
}


class ResNetBlock(BaseLayer):
    """A residual branch of three convolutions, the second of which is a quarter as wide.

    Attributes:
      input_dims: Number of input channels.
      output_dims: Number of output channels.
      kernel_size: Height and width of the wide kernels.
      stride: Stride of the block on both axes.
      conv_tpl: Convolutions. The shortcut has one with a kernel of 1 × 1 if shapes differ.
      activation_tpl: Activation between the convolutions and after the sum.
      droppath_rate: Probability that training drops the branch of an example.
      zero_init_residual: True for a branch that starts at 0, by the scale of its last norm.
    """

    contraction: ClassVar[int] = 4

    input_dims: int = 0
    output_dims: int = 0
    kernel_size: int = 3
    stride: int = 1
    conv_tpl: Config[ConvBNAct] = sub_config_field(ConvBNAct.HParams, **_CONV)
    activation_tpl: Config[BaseActivation] = sub_config_field(ReLU.HParams)
    droppath_rate: float = 0.0
    zero_init_residual: bool = False

    def setup(self) -> None:
        """Create the convolutions."""
        check_divisible(self, by=("contraction", self.contraction), output_dims=self.output_dims)
        linear = Identity.HParams.config()
        sizes, branch = self._sizes(), []
        dims = self.input_dims
        for number, (kernel, output_dims, stride) in enumerate(sizes, 1):
            conv = self.conv_tpl.clone(input_dims=dims, output_dims=output_dims)
            activation = self.activation_tpl if number < len(sizes) else linear
            conv.set(kernel_size=(kernel, kernel), strides=stride, activation_tpl=activation)
            branch.append(conv)
            dims = output_dims
        if self.zero_init_residual:
            norm = branch[-1].batch_norm_tpl
            require(norm is not None, self, "conv_tpl.batch_norm_tpl", norm, "a BatchNorm")
            branch[-1].batch_norm_tpl = norm.clone(initial_scale=0.0)
        self.create_children("body", branch)
        if self._has_shortcut:
            ends = {"input_dims": self.input_dims, "output_dims": self.output_dims}
            plain: Any = {"kernel_size": (1, 1), "strides": self.stride, "activation_tpl": linear}
            self.create_child("shortcut", self.conv_tpl, **ends, **plain)
        self.create_child("residual", StochasticResidual.HParams.config(rate=self.droppath_rate))
        self.create_child("activation", self.activation_tpl)

    def fprop(self, inputs: jax.Array) -> jax.Array:
        """Map `[batch, height, width, input_dims]` to `[batch, height', width', output_dims]`."""
        outputs = inputs
        for conv in self.body:
            outputs = conv(outputs)
        shortcut = self.shortcut(inputs) if self._has_shortcut else inputs
        return self.activation(self.residual(shortcut, outputs))

    @property
    def _has_shortcut(self) -> bool:
        return self.input_dims != self.output_dims or self.stride != 1

    def _sizes(self) -> list[tuple[int, int, int]]:
        """Return (kernel, output channels, stride) of the convolutions of the branch."""
        narrow, wide = self.output_dims // 4, self.output_dims
        return [(1, narrow, 1), (self.kernel_size, narrow, self.stride), (1, wide, 1)]


class ResNetBasicBlock(ResNetBlock):
    """A residual branch of two convolutions of equal width, with the fields of `ResNetBlock`."""

    contraction: ClassVar[int] = 1

    def _sizes(self) -> list[tuple[int, int, int]]:
        kernel, dims = self.kernel_size, self.output_dims
        return [(kernel, dims, self.stride), (kernel, dims, 1)]


class ResNet(BaseLayer):
    """Stages of residual blocks: images `[batch, height, width, channels]` → features.

    The output is `[batch, height/32, width/32, channels[-1]]`, which a `ClassificationModel`
    averages. `resnet` returns the config of a published depth.

    Attributes:
      channels: Number of channels of each stage. The first convolution has as many as the first
        stage, or a quarter in front of bottleneck blocks.
      blocks: Number of blocks of each stage. All stages but the first halve height and width.
      image_channels: Number of channels of the images.
      block_tpl: Block of all stages, `ResNetBlock` or `ResNetBasicBlock`.
      conv_tpl: Convolutions of the network, those of the blocks included.
      entry_kernel: Height and width of the kernel of the first convolution.
      entry_stride: Stride of the first convolution.
      entry_pool_tpl: Pooling after the first convolution; None for none, as for small images.
    """

    channels: tuple[int, ...] = (256, 512, 1024, 2048)
    blocks: tuple[int, ...] = (3, 4, 6, 3)
    image_channels: int = 3
    block_tpl: Config[ResNetBlock] = sub_config_field(ResNetBlock.HParams)
    conv_tpl: Config[ConvBNAct] = sub_config_field(ConvBNAct.HParams, **_CONV)
    entry_kernel: int = 7
    entry_stride: int = 2
    entry_pool_tpl: Config[BaseLayer] | None = sub_config_field(
        Pooling.HParams, window=(3, 3), strides=2
    )

    def setup(self) -> None:
        """Create the first convolution and the blocks."""
        expected = f"a number for each of {len(self.channels)} stages (channels)"
        require(len(self.blocks) == len(self.channels), self, "blocks", self.blocks, expected)
        dims = self.channels[0] // target_of(self.block_tpl).contraction
        entry = self.conv_tpl.clone(input_dims=self.image_channels, output_dims=dims)
        entry.set(kernel_size=(self.entry_kernel,) * 2, strides=self.entry_stride)
        # The few channels of an image cannot be split.
        entry.weight_axes = (None, entry.weight_axes[1])
        self.create_child("entryflow_conv", entry)
        if self.entry_pool_tpl is not None:
            self.create_child("entryflow_pool", self.entry_pool_tpl)
        for stage, (channels, blocks) in enumerate(zip(self.channels, self.blocks, strict=True)):
            for number in range(blocks):
                fields: Any = {"input_dims": dims, "output_dims": channels}
                fields |= {"stride": 2 if stage and not number else 1, "conv_tpl": self.conv_tpl}
                self.create_child(f"stage_{stage}_block_{number}", self.block_tpl, **fields)
                dims = channels

    def fprop(self, images: jax.Array) -> jax.Array:
        """Map images `[batch, height, width, channels]` to `[batch, height', width', dims]`."""
        return self.stages(images)[-1]

    def stages(self, images: jax.Array) -> list[jax.Array]:
        """Return the output `[batch, height', width', channels]` of each stage."""
        x = self.entryflow_conv(images)
        if self.entry_pool_tpl is not None:
            x = self.entryflow_pool(x)
        outputs = []
        for stage, blocks in enumerate(self.blocks):
            for number in range(blocks):
                x = getattr(self, f"stage_{stage}_block_{number}")(x)
            outputs.append(x)
        return outputs


_BLOCKS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3)}
_BLOCKS |= {101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}


def resnet(depth: int) -> Config[ResNet]:
    """Return the config of ResNet-18, -34, -50, -101 or -152.

    Raises:
      ConfigError: The depth is another.
    """
    check_choice("resnet", _BLOCKS, depth=depth)
    config = ResNet.HParams.config(blocks=_BLOCKS[depth])
    if depth < 50:
        config.set(channels=(64, 128, 256, 512), block_tpl=ResNetBasicBlock.HParams.config())
    return config
