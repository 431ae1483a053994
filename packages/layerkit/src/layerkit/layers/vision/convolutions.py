"""Convolutions over `[batch, *positions, channels]`, with any number of axes of positions.

`kernel_size` has a number for each axis: one for sound, two for images `[batch, height, width,
channels]`, three for video. A depth-wise convolution has `num_groups=input_dims`. A separable one
is a `Sequential` of a depth-wise convolution and one with a kernel of 1 × 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from layerkit.base.base_layer import BaseLayer
from layerkit.base.weights import WeightHParams, WeightInit
from layerkit.config import Config, sub_config_field
from layerkit.config.checks import check_divisible, check_last_axis, check_sizes, require
from layerkit.config.hparams import Conditions
from layerkit.layers.basic.batch_norm import BatchNorm
from layerkit.layers.basic.dots import add_bias
from layerkit.layers.basic.elementwise import BaseActivation, ReLU
from layerkit.layers.basic.normalizations import BaseNormalization

Pairs = tuple[tuple[int, int], ...]
Padding = Literal["SAME", "EVEN", "VALID", "CAUSAL"] | Pairs
"""Padding before and after each axis of positions, or its rule; see `resolve_padding`."""


def expand_axes(layer: BaseLayer, rank: int, **fields: int | tuple[int, ...]) -> list[tuple]:
    """Return the values of fields for each of `rank` axes, for which an integer stands too.

    Raises:
      ConfigError: A field has another number of values, or one below 1.
    """
    expanded = []
    for name, value in fields.items():
        values = (value,) * rank if isinstance(value, int) else tuple(value)
        is_valid = len(values) == rank and min(values, default=0) >= 1
        require(is_valid, layer, name, value, f"a positive integer for each of {rank} axes")
        expanded.append(values)
    return expanded


def check_padding(layer: BaseLayer, padding: Padding, rank: int) -> None:
    """Raise `ConfigError` unless the field `padding` is a rule or has `rank` axes."""
    is_valid = isinstance(padding, str) or len(padding) == rank
    require(is_valid, layer, "padding", padding, f"(before, after) for each of {rank} axes")


def resolve_padding(
    padding: Padding, sizes: Sequence[int], dilations: Sequence[int]
) -> str | list[tuple[int, int]]:
    """Return the padding of a window as JAX reads it.

    Args:
      padding: `SAME` for ⌈size/stride⌉ outputs, as in TensorFlow; `EVEN` for the padding of stride
        1 at every stride, as in PyTorch and Praxis; `VALID` for none; `CAUSAL` for `EVEN` with all
        padding of the first axis before it; or the padding (before, after) of each axis.
      sizes: Size of the window on each axis.
      dilations: Distance of the window's entries on each axis.
    """
    if not isinstance(padding, str):
        return list(padding)
    if padding in ("SAME", "VALID"):
        return padding
    totals = [dilation * (size - 1) for size, dilation in zip(sizes, dilations, strict=True)]
    pairs = [(total // 2, total - total // 2) for total in totals]
    return pairs if padding == "EVEN" else [(totals[0], 0), *pairs[1:]]


class Conv(BaseLayer):
    """A convolution: `[batch, *positions, input_dims]` → `[batch, *positions', output_dims]`.

    Attributes:
      input_dims: Number of input channels.
      output_dims: Number of output channels.
      kernel_size: Size of the kernel on each axis of positions.
      strides: Distance of the outputs, in inputs; an integer stands for all axes.
      dilations: Distance of the inputs that an output reads; an integer stands for all axes.
      num_groups: Number of groups of adjacent channels. Outputs of a group read its inputs only.
      padding: Padding with zeros; see `resolve_padding`.
      use_bias: True to add `b` `[output_dims]`, which starts at 0.
      weight_axes: Logical axes of the input and output channels of the weight `w` `[*kernel_size,
        input_dims / num_groups, output_dims]`. That of the inputs is left out if there are groups
        or one channel.
      activation_axes: Logical axes of the outputs; None leaves their layout to the compiler.
      weight_init: Initializer of `w`; None inherits `params_init`. Both fans count the window.

    Raises:
      ConfigError: A size is below one, `num_groups` does not divide the channels, or a field has
        another number of axes than `kernel_size`.
    """

    input_dims: int = 0
    output_dims: int = 0
    kernel_size: tuple[int, ...] = (3, 3)
    strides: int | tuple[int, ...] = 1
    dilations: int | tuple[int, ...] = 1
    num_groups: int = 1
    padding: Padding = "SAME"
    use_bias: bool = False
    weight_axes: tuple[str | None, str | None] = ("embed", "mlp")
    activation_axes: tuple[str | None, ...] | None = None
    weight_init: WeightInit | None = None

    def setup(self) -> None:
        """Create the weights."""
        channels = {"input_dims": self.input_dims, "output_dims": self.output_dims}
        check_sizes(self, **channels, num_groups=self.num_groups)
        check_divisible(self, by=("num_groups", self.num_groups), **channels)
        rank = len(self.kernel_size)
        expand_axes(self, rank, kernel_size=self.kernel_size)
        check_padding(self, self.padding, rank)
        inputs, outputs = self.weight_axes
        weight = WeightHParams(
            (*self.kernel_size, self.input_dims // self.num_groups, self.output_dims),
            (*(None,) * rank, inputs if self.num_groups == 1 < self.input_dims else None, outputs),
            init=self.weight_init,
            fan_in_dims=tuple(range(rank + 1)),
            fan_out_dims=(rank + 1,),
            window_dims=tuple(range(rank)),
        )
        self.create_variable("w", weight)
        if self.use_bias:
            zeros = WeightInit.Constant(0.0)
            self.create_variable("b", WeightHParams((self.output_dims,), (outputs,), init=zeros))

    def fprop(self, inputs: jax.Array) -> jax.Array:
        """Map `[batch, *positions, input_dims]` to `[batch, *positions', output_dims]`."""
        rank = len(self.kernel_size)
        check_last_axis(self, inputs, input_dims=self.input_dims)
        shape, expected = list(inputs.shape), f"a batch axis, {rank} of positions, and channels"
        require(inputs.ndim == rank + 2, self, "shape of inputs", shape, expected)
        inputs = self._join_positions(inputs.astype(self.compute_dtype))
        outputs = self._join_positions(self._convolve(inputs, self.theta.w))
        if self.use_bias:
            outputs = add_bias(outputs, self.theta.b)
        if self.activation_axes is not None:
            outputs = self.constrain(outputs, *self.activation_axes)
        return outputs

    def _join_positions(self, x: jax.Array) -> jax.Array:
        """Constrain the positions of `[batch, *positions, channels]` to be whole on each device.

        XLA's partitioner (JAX 0.10) computes wrong values and gradients if positions are split, as
        over context, and channels too.
        """
        sharding = self.inherited("sharding")
        if sharding is None or sharding.mesh is None:
            return x
        free, joined = PartitionSpec.UNCONSTRAINED, (None,) * len(self.kernel_size)
        place = NamedSharding(sharding.mesh, PartitionSpec(free, *joined, free))
        return jax.lax.with_sharding_constraint(x, place)

    def _convolve(self, x: jax.Array, w: jax.Array) -> jax.Array:
        steps = self._steps()
        padding = resolve_padding(self.padding, self.kernel_size, steps["rhs_dilation"])
        strides, groups = steps.pop("strides"), self.num_groups
        if groups > 1 and self._splits_more_than_rows():
            return sum_windows(x, w, strides, padding, steps["rhs_dilation"], groups)
        return jax.lax.conv_general_dilated(
            x, w, strides, padding, feature_group_count=groups, **steps
        )

    def _splits_more_than_rows(self) -> bool:
        """Return whether the mesh has devices with the same rows of a batch."""
        sharding = self.inherited("sharding")
        if sharding is None or sharding.mesh is None:
            return False
        return bool(sharding.num_shards("batch") < sharding.mesh.size)

    def _steps(self) -> dict[str, Any]:
        """Return the strides, the dilations and the names of axes, as JAX reads them."""
        rank = len(self.kernel_size)
        steps = expand_axes(self, rank, strides=self.strides, dilations=self.dilations)
        positions = "".join(map(str, range(rank)))
        names = (f"N{positions}C", f"{positions}IO", f"N{positions}C")
        return {"strides": steps[0], "rhs_dilation": steps[1], "dimension_numbers": names}


def sum_windows(
    x: jax.Array,
    w: jax.Array,
    strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    dilations: Sequence[int],
    groups: int,
) -> jax.Array:
    """Return a convolution in groups as a sum of products over the entries of the window.

    XLA's partitioner (JAX 0.10) computes wrong gradients of the weights of `conv_general_dilated`
    with groups if rows are split over some of the mesh axes and repeated over others.

    Args:
      x: `[batch, *positions, input_dims]`.
      w: `[*kernel_size, input_dims / groups, output_dims]`.
      strides: Distance of the outputs on each axis of positions.
      padding: As `conv_general_dilated` reads it.
      dilations: Distance of the window's entries on each axis.
      groups: Number of groups of adjacent channels.

    Returns:
      `[batch, *positions', output_dims]`.
    """
    rank = len(strides)
    sizes = [d * (size - 1) + 1 for d, size in zip(dilations, w.shape[:rank], strict=True)]
    if isinstance(padding, str):
        padding = jax.lax.padtype_to_pads(x.shape[1:-1], sizes, strides, padding)
    # Unlike `jnp.pad`, this supports negative padding.
    x = jax.lax.pad(x, x.dtype.type(0), [(*pair, 0) for pair in ((0, 0), *padding, (0, 0))])
    spans = [max(0, length - size + 1) for length, size in zip(x.shape[1:-1], sizes, strict=True)]

    # The backward pass takes the windows of `x` again, or they would all be in memory.
    @jax.checkpoint
    def run(x: jax.Array, w: jax.Array) -> jax.Array:
        terms = []
        for entry in np.ndindex(*w.shape[:rank]):
            steps = zip(entry, dilations, spans, strides, strict=True)
            places = [slice(at * d, at * d + span, stride) for at, d, span, stride in steps]
            window = x[(slice(None), *places)]
            window = window.reshape(*window.shape[:-1], groups, w.shape[-2])
            kernel = w[entry].reshape(w.shape[-2], groups, -1)
            product = {"preferred_element_type": jnp.float32}
            terms.append(jnp.einsum("...gi,igo->...go", window, kernel, **product))
        total = sum(terms[1:], terms[0])
        return total.reshape(*total.shape[:-2], w.shape[-1]).astype(x.dtype)

    return run(x, w)


class ConvTranspose(Conv):
    """A transposed convolution, which has `strides` outputs for each input.

    Input i adds its channels times w[k] to output strides·i + dilations·k, as in
    torch.nn.ConvTranspose2d. The other fields are those of `Conv`.

    Attributes:
      padding: `VALID` for all outputs; `SAME` for size·stride of them; or how many outputs are cut
        off (before, after) each axis.
    """

    used_only_if: ClassVar[Conditions] = {"num_groups": "never"}

    padding: Literal["SAME", "VALID"] | Pairs = "SAME"

    def _convolve(self, x: jax.Array, w: jax.Array) -> jax.Array:
        steps = self._steps()
        padding: str | list[tuple[int, int]] = self.padding  # type: ignore[assignment]
        if not isinstance(padding, str):
            axes = zip(steps["rhs_dilation"], self.kernel_size, padding, strict=True)
            padding = [
                (d * (k - 1) - before, d * (k - 1) - after) for d, k, (before, after) in axes
            ]
        flipped = jnp.flip(w, range(len(self.kernel_size)))
        return jax.lax.conv_transpose(x, flipped, padding=padding, **steps)


class ConvBNAct(Conv):
    """A convolution, a batch normalization and an activation.

    The other fields are those of `Conv`.

    Attributes:
      batch_norm_tpl: Norm of the outputs of the convolution; None for none.
      activation_tpl: Activation.
    """

    batch_norm_tpl: Config[BaseNormalization] | None = sub_config_field(BatchNorm.HParams)
    activation_tpl: Config[BaseActivation] = sub_config_field(ReLU.HParams)

    def setup(self) -> None:
        """Create the weights, the norm and the activation."""
        super().setup()
        if self.batch_norm_tpl is not None:
            self.create_child("bn", self.batch_norm_tpl, dims=self.output_dims)
        self.create_child("activation", self.activation_tpl)

    def fprop(self, inputs: jax.Array) -> jax.Array:
        """Map `[batch, *positions, input_dims]` to `[batch, *positions', output_dims]`."""
        outputs = super().fprop(inputs)
        if self.batch_norm_tpl is not None:
            outputs = self.bn(outputs)
        return self.activation(outputs)
