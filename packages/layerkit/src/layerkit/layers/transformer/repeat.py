"""Repeat: N copies of one layer in sequence, as a scan.

The weights of the copies are stacked on a leading axis named `layers`, and the program contains the
layer once, so compile time does not grow with depth. Only this module, `layerkit.ops.remat` and
`layerkit.layers.transformer.pipeline` use Flax's lifted transforms.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from layerkit.base.base_layer import COLLECTIONS, PARAMS, RANDOM, BaseLayer
from layerkit.base.sharding import BoundSharding, is_single_cpu, model_device
from layerkit.config import Config, is_config, sub_config_field
from layerkit.config.checks import check_sizes, require
from layerkit.ops.remat import check_remat_policy, is_in_remat, remat

# Compile time grows with the copies: by a half for 12 small layers on a CPU, and to three times for
# 12 layers on a GPU. A GPU's step gains more, and a longer run waits for the compiler.
_MOST_ON_CPU, _MOST_ON_GPU = 12, 24


class Repeat(BaseLayer):
    """A repeated layer `sub(sub(…sub(x, …), …), …)` with separate weights for each copy.

    The result of a copy is the first argument of the next (the carry); other arguments are passed
    to all copies unchanged. Random keys differ between copies. Auxiliary losses and summaries are
    stacked `[layers]`.

    On a mesh the rule for `act_embed` constrains the last axis of the carry, which is replicated by
    default. The copies or the compiler decide the layout of the other axes.

    Attributes:
      sub_tpl: Layer to repeat; its result has the shape and dtype of its first argument.
      num_repeats: Number of copies. A tuple stacks the weights on several axes, outermost first:
        (2, 3) runs six copies, copy i with the weights at [i // 3, i % 3], as in a circular
        pipeline.
      remat: Name of the rematerialization policy of each copy; see `layerkit.ops.remat`.
      unroll: Number of copies in one iteration of the (innermost) loop. None for all copies, if
        they have up to 12 layers on a single CPU, or 24 in training on GPUs, without
        rematerialization, and else 1. A loop copies what it saves for the backward pass; on GPUs,
        more so with several copies in an iteration.
    """

    sub_tpl: Config[BaseLayer] = sub_config_field(None)
    num_repeats: int | tuple[int, ...] = 1
    remat: str = "none"
    unroll: int | None = None

    def setup(self) -> None:
        """Check the fields and create the repeated layer."""
        is_valid = self.stacked_shape and all(size >= 1 for size in self.stacked_shape)
        expected = "a positive integer, or a tuple of positive integers"
        require(is_valid, self, "num_repeats", self.num_repeats, expected)
        check_sizes(self, unroll=self.unroll)
        check_remat_policy(self.remat, owner=self.path_name)
        self.keep_shared_weights_inside(self.sub_tpl)
        check_not_shared(self.path_name, "sub_tpl", self.sub_tpl)
        self.create_child("sub", self.sub_tpl)

    @property
    def stacked_shape(self) -> tuple[int, ...]:
        """Sizes of the leading axes of every stacked weight."""
        sizes = self.num_repeats
        return (sizes,) if isinstance(sizes, int) else tuple(sizes)

    def fprop(self, x: jax.Array, *args: Any, **kwargs: Any) -> jax.Array:
        """Return the result of the last copy, with the shape and dtype of `x` `[...]`."""
        return self.run("__call__", x, *args, **kwargs)

    def run(
        self, method: str, x: Any, *args: Any, per_copy: dict[str, Any] | None = None, **kwargs: Any
    ) -> Any:
        """Run a method of every copy in sequence; its result is the next first argument.

        Args:
          method: Name of the method.
          x: First argument, a pytree of arrays.
          *args: Further arguments of every copy.
          per_copy: Keyword arguments that differ between copies: pytrees of arrays `[copies, ...]`.
          **kwargs: Keyword arguments of every copy.

        Raises:
          ConfigError: The result has another structure, shape or dtype than the first argument.
        """

        # `args` and `kwargs` are closed over, because they may contain objects other than arrays.
        def body(sub: BaseLayer, carry: Any, differing: dict[str, Any]) -> tuple[Any, None]:
            carry = jax.tree.map(lambda x: lay_out(self, x) if jnp.ndim(x) > 1 else x, carry)
            result = getattr(sub, method)(carry, *args, **differing, **kwargs)
            check_carry(carry, result, owner=self.path_name, runs=f"copy of {sub.path_name}")
            return result, None

        shape = self.stacked_shape
        differing = jax.tree.map(lambda leaf: leaf.reshape(shape + leaf.shape[1:]), per_copy or {})
        unroll = self._num_unrolled()
        iterations = math.prod(shape) / min(unroll, shape[-1])
        body = remat(body, self.remat, in_scan=iterations > 1)
        return self._scan(body, unroll=unroll)(self.sub, x, differing)[0]

    def init_cache(self, *args: Any, **kwargs: Any) -> None:
        """Create the decoding caches of every copy, stacked on a leading `layers` axis."""
        self._for_each(lambda sub: sub.init_cache(*args, **kwargs))

    def create_weights(self) -> None:
        """Create the weights of every copy, stacked on a leading `layers` axis."""
        self._for_each(lambda sub: sub.create_weights())

    def _for_each(self, visit: Callable[[Any], None]) -> None:
        def body(sub: Any, carry: tuple[()], _: dict[str, Any]) -> tuple[tuple[()], None]:
            visit(sub)
            return carry, None

        self._scan(body)(self.sub, (), {})

    def _num_unrolled(self) -> int:
        """Return the number of copies in one iteration of the innermost loop."""
        if self.unroll is not None:
            return self.unroll
        # Outside of loops, XLA's CPU backend merges the recomputation with the first computation.
        # A copy may be a stack, whose layers have a policy of their own.
        has_remat = {self.remat, getattr(self.sub_tpl, "remat", "none")} != {
            "none"
        } or is_in_remat()
        if has_remat or len(self.stacked_shape) > 1:
            return 1
        (copies,) = self.stacked_shape
        layers = copies * getattr(self.sub_tpl, "num_layers", 1)
        sharding, is_training = self.inherited("sharding"), bool(self.inherited("train"))
        return copies if is_unrolled_by_default(sharding, layers, is_training=is_training) else 1

    def _scan(self, body: Any, *, unroll: int = 1) -> Any:
        """Return `body(sub, carry, own)` as a scan, or as nested scans, outermost axis first."""
        for length in reversed(self.stacked_shape):
            body = nn.scan(body, in_axes=0, length=length, unroll=unroll, **lift_options("layers"))
            unroll = 1
        return body


def is_unrolled_by_default(
    sharding: BoundSharding | None, layers: int, *, is_training: bool
) -> bool:
    """Return whether repeated layers are unrolled: few on a single CPU or, in training, on GPUs.

    Without a backward pass, a loop on GPUs copies little and keeps no second copy of the weights.

    Args:
      sharding: Sharding that the layer is bound to; None or without a mesh for JAX's devices.
      layers: Number of layers in all copies.
      is_training: Whether a backward pass follows.
    """
    if is_single_cpu(sharding):
        return layers <= _MOST_ON_CPU
    if not is_training or (sharding is not None and isinstance(sharding.mesh, AbstractMesh)):
        return False
    return bool(model_device(sharding).platform == "gpu") and layers <= _MOST_ON_GPU


def lay_out(
    layer: BaseLayer, x: jax.Array, *leading: str | None, is_carry: bool = True
) -> jax.Array:
    """Constrain the leading axes of `x` `[...]` in a mesh and, for a carry, also the last axis.

    The compiler might otherwise split the last axis like the weights, and XLA's partitioner (JAX
    0.10) then computes wrong gradients if both axes of the weights are split.
    """
    sharding = layer.inherited("sharding")
    if sharding is None or sharding.mesh is None:
        return x
    spec = partial(sharding.spec, owner=layer.path_name)
    entries: list[Any] = [*spec(leading, shape=x.shape[: len(leading)])]
    entries += [PartitionSpec.UNCONSTRAINED] * (x.ndim - len(leading))
    if is_carry and x.ndim > len(leading):
        entries[-1:] = spec(("act_embed",), shape=x.shape[-1:])
    place = NamedSharding(sharding.mesh, PartitionSpec(*entries))
    return jax.lax.with_sharding_constraint(x, place)


def lift_options(axis: str) -> dict[str, Any]:
    """Return the options of a Flax transform of variables that are stacked on a leading axis."""
    return {
        "variable_axes": dict.fromkeys(COLLECTIONS, 0),
        "split_rngs": {PARAMS: True, RANDOM: True},
        "metadata_params": {nn.PARTITION_NAME: axis},
    }


def check_not_shared(owner: str, field: str, template: Any) -> None:
    """Raise `ConfigError` if a template that is copied has a `shared_weight_id`."""
    shared_id = template.shared_weight_id if is_config(template) else None
    expected = "None, since every copy has separate weights"
    require(shared_id is None, owner, f"{field}.shared_weight_id", shared_id, expected)


def check_carry(carry: Any, result: Any, *, owner: str, runs: str) -> None:
    """Raise `ConfigError` if the result of a layer cannot be the first argument of the next.

    Args:
      carry: First argument, a pytree of arrays `[...]`.
      result: Result, which must have the same structure, shapes and dtypes.
      owner: Name of the layer that runs the sequence.
      runs: Name of the layers of the sequence.
    """
    before, after = (
        jax.tree.map(lambda x: f"{jnp.result_type(x)}{list(jnp.shape(x))}", tree)
        for tree in (carry, result)
    )
    require(before == after, owner, f"result of {runs}", after, f"{before!r}, as its argument")
