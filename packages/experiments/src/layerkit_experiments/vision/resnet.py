"""ResNet (He et al., 2015, arXiv:1512.03385) as a module of Flax, with the details of Praxis.

Convolutions pad evenly, and the stride of a block is that of its middle convolution.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import linen as nn

# Normal with standard deviation 1.4141 / √fan_out.
_INIT = nn.initializers.variance_scaling(1.4141**2, "fan_out", "normal")


class ConvNorm(nn.Module):
    """A convolution without bias, and batch normalization.

    Attributes:
      channels: Number of output channels.
      kernel_size: Height and width of the kernel, odd.
      stride: Step between outputs, in both directions.
      starts_at_zero: True for a scale that starts at 0 instead of 1, so that a residual branch adds
        nothing at first (Goyal et al., 2017, arXiv:1706.02677).
    """

    channels: int
    kernel_size: int = 1
    stride: int = 1
    starts_at_zero: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, *, is_training: bool) -> jax.Array:
        """Map `[batch, height, width, channels]` to `[batch, height', width', channels']`."""
        pad = (self.kernel_size - 1) // 2
        x = nn.Conv(
            self.channels,
            (self.kernel_size, self.kernel_size),
            strides=self.stride,
            padding=[(pad, pad), (pad, pad)],
            use_bias=False,
            kernel_init=_INIT,
            name="conv",
        )(x)
        scale = nn.initializers.zeros if self.starts_at_zero else nn.initializers.ones
        return nn.BatchNorm(
            use_running_average=not is_training,
            momentum=0.9,
            epsilon=1e-3,
            scale_init=scale,
            use_fast_variance=False,
            name="norm",
        )(x)


class BottleneckBlock(nn.Module):
    """A residual branch of three convolutions, of which the middle one is narrow.

    Attributes:
      channels: Number of output channels; the middle has a quarter.
      stride: Stride of the block.
    """

    channels: int
    stride: int = 1

    @nn.compact
    def __call__(self, x: jax.Array, *, is_training: bool) -> jax.Array:
        """Map `[batch, height, width, channels]` to `[batch, height', width', channels']`."""
        narrow = self.channels // 4
        y = nn.relu(ConvNorm(narrow, name="body_0")(x, is_training=is_training))
        middle = ConvNorm(narrow, kernel_size=3, stride=self.stride, name="body_1")
        y = nn.relu(middle(y, is_training=is_training))
        last = ConvNorm(self.channels, starts_at_zero=True, name="body_2")
        y = last(y, is_training=is_training)
        if x.shape[-1] != self.channels or self.stride != 1:
            shortcut = ConvNorm(self.channels, stride=self.stride, name="shortcut")
            x = shortcut(x, is_training=is_training)
        return nn.relu(x + y)


class ResNet(nn.Module):
    """Stages of residual blocks; the output is the mean over all positions.

    Attributes:
      channels: Number of channels of each stage; the first convolution has a quarter of the first.
      blocks: Number of blocks of each stage. All stages but the first halve height and width.
    """

    channels: Sequence[int] = (256, 512, 1024, 2048)
    blocks: Sequence[int] = (3, 4, 6, 3)

    @nn.compact
    def __call__(self, images: jax.Array, *, is_training: bool) -> jax.Array:
        """Map images float32 `[batch, height, width, 3]` to features `[batch, channels]`."""
        entry = ConvNorm(self.channels[0] // 4, kernel_size=7, stride=2, name="entryflow_conv")
        x = nn.relu(entry(images, is_training=is_training))
        x = nn.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
        for stage, (channels, blocks) in enumerate(zip(self.channels, self.blocks, strict=True)):
            for number in range(blocks):
                stride = 2 if stage > 0 and number == 0 else 1
                name = f"stage_{stage}_block_{number}"
                x = BottleneckBlock(channels, stride, name=name)(x, is_training=is_training)
        return jnp.mean(x, axis=(1, 2))
