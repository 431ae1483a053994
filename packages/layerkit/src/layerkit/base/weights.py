"""Weights: declaration (shape, initializer, logical axes, dtype), initialization and sharing."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from flax.core import meta
from flax.core.meta import unbox as unbox

from layerkit.config import assigned_fields, walk_configs
from layerkit.config.checks import Named, require
from layerkit.errors import ConfigError

_DTYPES = ("float32", "bfloat16", "float16", "float64")


def floating_dtype(value: Any, *, field: str, owner: str) -> jnp.dtype:
    """Return the dtype of weights or activations; None stands for float32.

    Raises:
      ConfigError: The value is not a floating dtype. An integer dtype would round every value.
    """
    with contextlib.suppress(TypeError):
        dtype = jnp.dtype(jnp.float32 if value is None else value)
        if jnp.issubdtype(dtype, jnp.floating):
            return dtype
    raise ConfigError(
        owner=owner,
        field=field,
        value=value,
        expected="a floating dtype such as 'float32' or 'bfloat16'",
        choices=_DTYPES,
    )


@dataclasses.dataclass(frozen=True)
class WeightInit:
    """An initializer of weights, made by the class methods below.

    Attributes:
      method: Name of the distribution.
      scale: Parameter of the distribution; see each class method.
    """

    method: str
    scale: Any = 1.0

    @classmethod
    def Xavier(cls, scale: float = 1.0) -> WeightInit:  # noqa: N802 - a constructor
        """Draw uniformly from ±scale·√(6/(fan_in+fan_out)) (Glorot and Bengio, 2010; default)."""
        return cls("xavier", scale)

    @classmethod
    def XavierLastAxes(cls, scale: float = 1.0) -> WeightInit:  # noqa: N802
        """Draw uniformly from ±scale·√(6/(fan_in+fan_out)), with the fans of Praxis.

        Praxis takes the sizes of the last two axes times all leading ones, as TensorFlow does for
        convolutions. The fans of a projection [dims, heads, head_dim] are dims·heads and
        dims·head_dim: it starts narrower than by the definition. See `WeightHParams.last_axes`.
        """
        return cls("xavier_last_axes", scale)

    @classmethod
    def Gaussian(cls, scale: float = 1.0) -> WeightInit:  # noqa: N802
        """Draw from a normal distribution with standard deviation `scale`."""
        return cls("gaussian", scale)

    @classmethod
    def TruncatedGaussian(cls, scale: float = 1.0) -> WeightInit:  # noqa: N802
        """Draw from a normal distribution with standard deviation `scale`, truncated at ±2·scale.

        The standard deviation is that before truncation.
        """
        return cls("truncated_gaussian", scale)

    @classmethod
    def FanIn(cls, scale: float = 1.0) -> WeightInit:  # noqa: N802
        """Draw from a normal distribution with deviation scale/√fan_in (LeCun et al., 1998)."""
        return cls("fan_in", scale)

    @classmethod
    def FanOut(cls, scale: float = 1.0) -> WeightInit:  # noqa: N802
        """Draw from a normal distribution with deviation scale/√fan_out (He et al., 2015)."""
        return cls("fan_out", scale)

    @classmethod
    def Uniform(cls, scale: float = 1.0) -> WeightInit:  # noqa: N802
        """Draw uniformly from ±scale."""
        return cls("uniform", scale)

    @classmethod
    def Constant(cls, value: float | tuple[float, ...] = 0.0) -> WeightInit:  # noqa: N802
        """Set every entry to `value`; several values are those of the indices of the first axis."""
        return cls("constant", value)


@dataclasses.dataclass(frozen=True)
class WeightHParams:
    """A declaration of a weight.

    Attributes:
      shape: Shape of the weight.
      axes: Logical axis name, or None, of each dimension; see `layerkit.base.sharding`.
      init: Initializer; None inherits the layer's `params_init`.
      dtype: Storage dtype; None inherits the layer's `dtype`.
      fan_in_dims: Dimensions that are contracted with the input; None for all but the last.
      fan_out_dims: Dimensions of the output; None for the last. A weight that declares both is that
        of a product, as one of `create_variable(…, is_factor=True)`.
      window_dims: Dimensions of the window of a convolution, which count in both fans.
      parts: (dimension, counted from the end; sizes along it) of the products that the weight
        combines, such as (-2, (group, 1, 1)) for queries, keys and values; None for one product.
      last_axes: Dimensions that Praxis stores as the last two, for `WeightInit.XavierLastAxes`;
        None for the last two.
      decays: True for a weight that weight decay shrinks, as matrices; False for one that it
        spares, as biases, scales and learned positions. None decides: True for the weight of a
        product (`create_variable(…, is_factor=True)`) and for a weight of two or more dimensions
        that starts at random.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    init: WeightInit | None = None
    dtype: Any = None
    fan_in_dims: tuple[int, ...] | None = None
    fan_out_dims: tuple[int, ...] | None = None
    window_dims: tuple[int, ...] = ()
    parts: tuple[int, tuple[int, ...]] | None = None
    last_axes: tuple[int, int] | None = None
    decays: bool | None = None

    @property
    def contracted_dims(self) -> tuple[int, ...]:
        """Dimensions that are contracted with the input."""
        if self.fan_in_dims is not None:
            return self.fan_in_dims
        return tuple(range(len(self.shape) - 1)) or tuple(range(len(self.shape)))

    @property
    def output_dims(self) -> tuple[int, ...]:
        """Dimensions of the output."""
        if self.fan_out_dims is not None:
            return self.fan_out_dims
        return (len(self.shape) - 1,) if self.shape else ()

    def fans(self, init: WeightInit | None = None) -> tuple[int, int]:
        """Return (fan_in, fan_out) of the weight, as the initializer defines them."""
        if init is not None and init.method == "xavier_last_axes" and len(self.shape) > 1:
            first, second = self.last_axes or (-2, -1)
            size = math.prod(self.shape)
            return size // self.shape[second], size // self.shape[first]
        return (
            math.prod(self.shape[dim] for dim in self.contracted_dims),
            math.prod(self.shape[dim] for dim in (*self.window_dims, *self.output_dims)),
        )


def check_declaration(owner: Named, name: str, weight: WeightHParams, *, sharding: Any) -> None:
    """Raise `ConfigError` unless sizes are positive, and axes have rules and name each dimension.

    Args:
      owner: Layer of the weight.
      name: Name of the weight.
      weight: Declaration of the weight.
      sharding: `BoundSharding` of the layer; None without a mesh.
    """
    axes, shape = weight.axes, weight.shape
    expected = f"one name for each dimension of {shape}"
    require(len(axes) == len(shape), owner, f"axes of {name}", axes, expected)
    sizes = dict(zip(axes, shape, strict=True))
    require(min(shape, default=1) >= 1, owner, f"shape of {name}", sizes, "sizes of at least 1")
    if sharding is not None:
        for axis in filter(None, weight.axes):
            sharding.rules.mesh_axes(axis, owner=f"{owner.path_name}.{name}")


class WeightBox(struct.PyTreeNode, meta.AxisMetadata[Any]):
    """A weight with its declaration, as initialization returns it.

    Flax's lifted transforms add and remove the names of stacked axes (`layers`) through it.

    Attributes:
      value: Array `[...]` of the weight.
      axes: Logical axis name, or None, of each dimension.
      init: Initializer that a layer declared. A stack draws each of its layers separately.
      fans: (fan_in, fan_out) of the declared weight.
      decays: True if weight decay shrinks the weight; see `WeightHParams.decays`.
      is_factor: True for the weight of a product; see `WeightHParams.fan_out_dims`.
      fan_in_dims: Contracted dimensions, counted from the end, which stacked axes do not move.
      fan_out_dims: Dimensions of the output, counted from the end.
      parts: Products that the weight combines; see `WeightHParams.parts`.
    """

    value: Any
    axes: tuple[str | None, ...] = struct.field(pytree_node=False)
    init: WeightInit | None = struct.field(pytree_node=False, default=None)
    fans: tuple[int, int] | None = struct.field(pytree_node=False, default=None)
    decays: bool = struct.field(pytree_node=False, default=False)
    is_factor: bool = struct.field(pytree_node=False, default=False)
    fan_in_dims: tuple[int, ...] = struct.field(pytree_node=False, default=())
    fan_out_dims: tuple[int, ...] = struct.field(pytree_node=False, default=())
    parts: tuple[int, tuple[int, ...]] | None = struct.field(pytree_node=False, default=None)

    def unbox(self) -> Any:
        """Return the array."""
        return self.value

    def replace_boxed(self, val: Any) -> WeightBox:
        """Return a box with another array and the same axes."""
        return self.replace(value=val)

    def add_axis(self, index: int, params: dict[Any, Any]) -> WeightBox:
        """Return a box with the name of a stacked axis inserted."""
        axes = list(self.axes)
        axes.insert(index, params[meta.PARTITION_NAME])
        return self.replace(axes=tuple(axes))

    def remove_axis(self, index: int, params: dict[Any, Any]) -> WeightBox:
        """Return a box with the name of a stacked axis removed."""
        axes = list(self.axes)
        del axes[index]
        return self.replace(axes=tuple(axes))


_UNIFORM = functools.partial(jax.random.uniform, minval=-1.0, maxval=1.0)
_DISTRIBUTIONS: dict[str, Callable[..., jax.Array]] = {
    "xavier": _UNIFORM,
    "xavier_last_axes": _UNIFORM,
    "uniform": _UNIFORM,
    "gaussian": jax.random.normal,
    "fan_in": jax.random.normal,
    "fan_out": jax.random.normal,
    "truncated_gaussian": functools.partial(jax.random.truncated_normal, lower=-2.0, upper=2.0),
}


def draw_boxed(
    key: jax.Array, *, weight: WeightHParams, init: WeightInit, dtype: Any, is_factor: bool
) -> WeightBox:
    """Return initial values `[...]` of a weight, cast to `dtype`, in a box with its declaration."""
    fan_in, fan_out = weight.fans(init)
    scale = init.scale
    if init.method.startswith("xavier"):
        scale *= math.sqrt(6.0 / (fan_in + fan_out))
    elif init.method == "fan_in":
        scale /= math.sqrt(fan_in)
    elif init.method == "fan_out":
        scale /= math.sqrt(fan_out)
    if init.method == "constant":
        ones = (1,) * (len(weight.shape) - 1)
        values = jnp.asarray(scale).reshape((-1, *ones) if weight.shape else ())
        value = jnp.broadcast_to(values, weight.shape)
    else:
        # Without an explicit dtype, JAX's x64 mode would draw other numbers.
        draw = _DISTRIBUTIONS[init.method]
        value = scale * draw(key, shape=weight.shape, dtype=jnp.float32)
    decays = weight.decays
    if decays is None:
        decays = is_factor or (len(weight.shape) > 1 and init.method != "constant")
    rank, declares_both = len(weight.shape), None not in (weight.fan_in_dims, weight.fan_out_dims)
    return WeightBox(
        value.astype(dtype),
        tuple(weight.axes),
        init,
        (fan_in, fan_out),
        decays,
        is_factor=is_factor or declares_both,
        fan_in_dims=tuple(dim % rank - rank for dim in weight.contracted_dims),
        fan_out_dims=tuple(dim % rank - rank for dim in weight.output_dims),
        parts=weight.parts,
    )


def is_box(value: Any) -> bool:
    """Return whether `value` is a weight with its axes."""
    return isinstance(value, WeightBox)


def logical_axes(tree: Any) -> Any:
    """Return the logical axes of a tree of boxed weights, and None for each unboxed leaf."""
    return jax.tree.map(lambda leaf: leaf.axes if is_box(leaf) else None, tree, is_leaf=is_box)


def shared_ids(template: Any) -> list[str]:
    """Return the ids of shared weights of the configs in a template."""
    ids = (assigned_fields(config).get("shared_weight_id") for config in walk_configs(template))
    return [shared_id for shared_id in ids if shared_id is not None]
