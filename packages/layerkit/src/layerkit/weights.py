"""Weights: their shape, initial values, logical axes and dtype, declared in one line each."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from flax.core import meta

from layerkit.near_names import near_names


def canonical_dtype(value: Any, *, field: str = "dtype") -> jnp.dtype:
    """Turns `jnp.bfloat16`, `"bfloat16"` or a NumPy dtype into a dtype.

    Raises:
      ValueError: not the name of a dtype.
    """
    try:
        return jnp.dtype(value)
    except TypeError:
        known = ("float32", "bfloat16", "float16", "float64", "int32", "int8")
        raise ValueError(
            f"{field}={value!r} is not a dtype{near_names(str(value), known)}"
        ) from None


def floating_dtype(value: Any, *, field: str, owner: str) -> jnp.dtype:
    """Like `canonical_dtype`, for weights and activations; None is float32.

    Raises:
      ValueError: not a dtype, or one of whole numbers, to which everything would be rounded.
    """
    dtype = canonical_dtype(jnp.float32 if value is None else value, field=field)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(
            f"{owner}: {field}={dtype.name!r}, expected a floating dtype such as 'float32' or"
            " 'bfloat16'"
        )
    return dtype


@dataclasses.dataclass(frozen=True)
class WeightInit:
    """How a weight's first values are drawn; made by the class methods below.

    Attributes:
      method: Name of the distribution.
      scale: Its one parameter (see each class method).
    """

    method: str
    scale: float = 1.0

    @classmethod
    def Xavier(cls, scale: float = 1.0) -> WeightInit:  # noqa: N802 - a constructor
        """Uniform in ±scale·√(6/(fan_in+fan_out)) (Glorot and Bengio, 2010). The default."""
        return cls("xavier", scale)

    @classmethod
    def Gaussian(cls, scale: float = 1.0) -> WeightInit:  # noqa: N802
        """Normal with standard deviation `scale`."""
        return cls("gaussian", scale)

    @classmethod
    def TruncatedGaussian(cls, scale: float = 1.0) -> WeightInit:  # noqa: N802
        """Normal with standard deviation `scale` before it is cut at ±2·scale."""
        return cls("truncated_gaussian", scale)

    @classmethod
    def FanIn(cls, scale: float = 1.0) -> WeightInit:  # noqa: N802
        """Normal with standard deviation scale/√fan_in (LeCun et al., 1998)."""
        return cls("fan_in", scale)

    @classmethod
    def Uniform(cls, scale: float = 1.0) -> WeightInit:  # noqa: N802
        """Uniform in ±scale."""
        return cls("uniform", scale)

    @classmethod
    def Constant(cls, value: float = 0.0) -> WeightInit:  # noqa: N802
        """Every entry is `value`."""
        return cls("constant", value)


def check_init(value: Any, *, owner: str) -> WeightInit:
    """`value` if it is an initialiser; None is Xavier.

    Raises:
      TypeError: something else, such as a bare number.
    """
    if value is None:
        return WeightInit.Xavier()
    if not isinstance(value, WeightInit):
        raise TypeError(
            f"{owner}={value!r}, expected a WeightInit such as WeightInit.Gaussian(0.02)"
        )
    return value


@dataclasses.dataclass(frozen=True)
class WeightHParams:
    """The declaration of one weight.

    Attributes:
      shape: Its dimensions.
      axes: A logical axis name (or None) per dimension; see `layerkit.sharding`.
      init: How it starts; None inherits the layer's `params_init`.
      dtype: None inherits the layer's `dtype`.
      fan_in_dims: Dimensions that are contracted with the input; default: all but the last.
      fan_out_dims: Dimensions of the output; default: the last.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    init: WeightInit | None = None
    dtype: Any = None
    fan_in_dims: tuple[int, ...] | None = None
    fan_out_dims: tuple[int, ...] | None = None

    def fans(self) -> tuple[int, int]:
        """(fan_in, fan_out) of the weight."""
        ins = self.fan_in_dims
        outs = self.fan_out_dims
        if ins is None:
            ins = tuple(range(len(self.shape) - 1)) or tuple(range(len(self.shape)))
        if outs is None:
            outs = (len(self.shape) - 1,) if self.shape else ()
        return (
            math.prod(self.shape[dim] for dim in ins),
            math.prod(self.shape[dim] for dim in outs),
        )


def draw_weight(key: jax.Array, weight: WeightHParams, init: WeightInit, dtype: Any) -> jax.Array:
    """The first values of a weight, `[...]` as it says; drawn in float32, then cast to `dtype`."""
    fan_in, fan_out = weight.fans()
    shape, scale = weight.shape, init.scale

    # The dtype is said because without it JAX's x64 mode would draw other numbers.
    def uniform() -> jax.Array:
        return jax.random.uniform(key, shape, jnp.float32, -1.0, 1.0)

    def normal() -> jax.Array:
        return jax.random.normal(key, shape, jnp.float32)

    def truncated_normal() -> jax.Array:
        return jax.random.truncated_normal(key, -2.0, 2.0, shape, jnp.float32)

    samplers: dict[str, Callable[[], jax.Array]] = {
        "xavier": lambda: scale * math.sqrt(6.0 / (fan_in + fan_out)) * uniform(),
        "gaussian": lambda: scale * normal(),
        "truncated_gaussian": lambda: scale * truncated_normal(),
        "fan_in": lambda: scale / math.sqrt(fan_in) * normal(),
        "uniform": lambda: scale * uniform(),
        "constant": lambda: jnp.full(shape, scale),
    }
    if init.method not in samplers:
        raise ValueError(
            f"unknown WeightInit method {init.method!r}{near_names(init.method, samplers)}"
        )
    return samplers[init.method]().astype(dtype)


class WeightBox(struct.PyTreeNode, meta.AxisMetadata[Any]):
    """A weight together with its logical axes, as it leaves initialisation.

    Flax's lifted transforms add and remove the names of stacked axes (`layers`) through it.

    Attributes:
      value: The weight, `[...]`.
      axes: Its logical axes.
      init: How it was drawn, where a layer declared that; a stack draws every layer by itself.
      fans: (fan_in, fan_out) that it was drawn by.
    """

    value: Any
    axes: tuple[str | None, ...] = struct.field(pytree_node=False)
    init: WeightInit | None = struct.field(pytree_node=False, default=None)
    fans: tuple[int, int] | None = struct.field(pytree_node=False, default=None)

    def unbox(self) -> Any:
        return self.value

    def replace_boxed(self, val: Any) -> WeightBox:
        return self.replace(value=val)

    def add_axis(self, index: int, params: dict[Any, Any]) -> WeightBox:
        axes = list(self.axes)
        axes.insert(index, params[meta.PARTITION_NAME])
        return self.replace(axes=tuple(axes))

    def remove_axis(self, index: int, params: dict[Any, Any]) -> WeightBox:
        axes = list(self.axes)
        del axes[index]
        return self.replace(axes=tuple(axes))


def is_box(value: Any) -> bool:
    """Whether `value` is a weight still together with its axes."""
    return isinstance(value, WeightBox)


def unbox(tree: Any) -> Any:
    """The plain arrays of a tree of weights."""
    return jax.tree.map(lambda leaf: leaf.value if is_box(leaf) else leaf, tree, is_leaf=is_box)


def logical_axes(tree: Any) -> Any:
    """The logical axes of a tree of boxed weights (None for a leaf without any)."""
    return jax.tree.map(lambda leaf: leaf.axes if is_box(leaf) else None, tree, is_leaf=is_box)
