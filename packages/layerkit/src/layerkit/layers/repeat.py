"""Repeat: N copies of one layer in a row, as a scan.

The weights of the copies are stacked on a leading axis named `layers`, and the program holds the
layer once, so compile time does not grow with depth. Flax's lifted transforms are used here, in
`layerkit.layers.remat` and in `layerkit.layers.pipeline`, and nowhere else.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import NamedSharding, PartitionSpec

from layerkit.base_layer import COLLECTIONS, PARAMS, RANDOM, BaseLayer
from layerkit.config import is_config, sub_config_field
from layerkit.layers.remat import check_remat_policy, remat


class Repeat(BaseLayer):
    """`sub(sub(…sub(x, …), …), …)`, each copy with weights and random numbers of its own.

    The first argument is handed from copy to copy; further arguments are given to each unchanged.
    Auxiliary losses and summaries come out stacked `[layers]`.

    On a mesh the last axis of what is handed on lies as the rule for `act_embed` says, whole by
    default; the layout of the others is the compiler's, or that of the constraints of the copies.

    Attributes:
      sub_tpl: The layer to repeat; its first result has the shape and dtype of its first argument.
      num_repeats: How often. Several numbers stack the weights on as many axes, the outermost
        first: (2, 3) runs six copies, copy i with the weights at [i // 3, i % 3]. So lie the
        weights of a circular pipeline, [repeats, layers].
      remat: Name of the rematerialisation policy around each copy; see `layerkit.layers.remat`.
      unroll: How many copies one iteration of the (innermost) loop holds.
    """

    sub_tpl: Any = sub_config_field(None)
    num_repeats: int | tuple[int, ...] = 1
    remat: str = "none"
    unroll: int = 1

    def setup(self) -> None:
        if not self.stacked_shape or any(size < 1 for size in self.stacked_shape):
            raise ValueError(f"{self.path_name}: num_repeats={self.num_repeats} must be at least 1")
        if self.unroll < 1:
            raise ValueError(f"{self.path_name}: unroll={self.unroll} must be at least 1")
        check_remat_policy(self.remat, owner=self.path_name, sharding=self.inherited("sharding"))
        self.keep_shared_weights_inside(self.sub_tpl)
        sub_tpl = self.sub_tpl
        if is_config(sub_tpl) and sub_tpl.shared_weight_id is not None:
            raise ValueError(
                f"{self.path_name}: every copy of sub_tpl has weights of its own;"
                f" unset shared_weight_id={sub_tpl.shared_weight_id!r}"
            )
        self.create_child("sub", sub_tpl)

    @property
    @nn.nowrap
    def stacked_shape(self) -> tuple[int, ...]:
        """The leading axes of every weight of the copies."""
        sizes = self.num_repeats
        return (sizes,) if isinstance(sizes, int) else tuple(sizes)

    def fprop(self, x: jax.Array, *args: Any, **kwargs: Any) -> jax.Array:
        """The last copy's result, with the shape and dtype of `x` `[...]`."""
        return self.run("__call__", x, *args, **kwargs)

    def run(
        self, method: str, x: Any, *args: Any, each: dict[str, Any] | None = None, **kwargs: Any
    ) -> Any:
        """Runs `method` of every copy in turn, handing on its result as the next first argument.

        Args:
          method: Of the copies.
          x: The first argument, a pytree of arrays.
          *args: Given to every copy as they are.
          each: Keyword arguments that differ from copy to copy: pytrees of arrays `[copies, ...]`.
          **kwargs: Given to every copy as they are.

        Raises:
          ValueError: the result has another structure, shape or dtype than the first argument.
        """

        # `args` and `kwargs` are closed over, so that what is not an array stays what it is.
        def body(sub: BaseLayer, carry: Any, own: dict[str, Any]) -> tuple[Any, None]:
            carry = jax.tree.map(self._lay_out, carry)
            result = getattr(sub, method)(carry, *args, **own, **kwargs)
            check_handed_on(carry, result, owner=self.path_name, runs=f"copy of {sub.path_name}")
            return result, None

        shape = self.stacked_shape
        own = jax.tree.map(lambda leaf: leaf.reshape(shape + leaf.shape[1:]), each or {})
        iterations = math.prod(shape) / min(self.unroll, shape[-1])
        return self._scan(remat(body, self.remat, in_scan=iterations > 1))(self.sub, x, own)[0]

    def init_cache(self, *args: Any, **kwargs: Any) -> None:
        """Creates the decoding caches of every copy, stacked on a leading `layers` axis."""

        def body(sub: Any, carry: tuple[()], _: dict[str, Any]) -> tuple[tuple[()], None]:
            sub.init_cache(*args, **kwargs)
            return carry, None

        self._scan(body)(self.sub, (), {})

    def create_weights(self) -> None:
        """Creates the weights of every copy, stacked on a leading `layers` axis."""

        def body(sub: BaseLayer, carry: tuple[()], _: dict[str, Any]) -> tuple[tuple[()], None]:
            sub.create_weights()
            return carry, None

        self._scan(body)(self.sub, (), {})

    @nn.nowrap
    def _lay_out(self, x: jax.Array) -> jax.Array:
        """Constrains the last axis of an array that is handed on.

        Left to itself, the compiler may split it like the weights, and XLA's partitioner (that of
        JAX 0.10) then gives wrong gradients where the weights are split along both axes.
        """
        sharding = self.inherited("sharding")
        if sharding is None or sharding.mesh is None or jnp.ndim(x) < 2:
            return x
        last = sharding.spec(("act_embed",), shape=x.shape[-1:], owner=self.path_name)
        others = [PartitionSpec.UNCONSTRAINED] * (x.ndim - 1)
        place = NamedSharding(sharding.mesh, PartitionSpec(*others, *last))
        return jax.lax.with_sharding_constraint(x, place)

    @nn.nowrap
    def _scan(self, body: Any) -> Any:
        """`body(sub, carry, own)` as a scan, or as scans within scans, outermost axis first."""
        unroll = self.unroll
        for length in reversed(self.stacked_shape):
            body = nn.scan(body, in_axes=0, length=length, unroll=unroll, **stacked_on("layers"))
            unroll = 1
        return body


def stacked_on(axis: str) -> dict[str, Any]:
    """How a Flax transform treats variables that are stacked on a leading axis of this name."""
    return {
        "variable_axes": dict.fromkeys(COLLECTIONS, 0),
        "split_rngs": {PARAMS: True, RANDOM: True},
        "metadata_params": {nn.PARTITION_NAME: axis},
    }


def check_handed_on(given: Any, result: Any, *, owner: str, runs: str) -> None:
    """Raises ValueError where what one layer of a row returns is not what the next one takes.

    Args:
      given: The first argument, a pytree of arrays `[...]`.
      result: What came of it.
      owner: Who runs the row, for the message.
      runs: What the row is of, likewise.
    """
    before, after = (
        jax.tree.map(lambda x: f"{jnp.result_type(x)}{list(jnp.shape(x))}", tree)
        for tree in (given, result)
    )
    if before != after:
        raise ValueError(
            f"{owner}: a {runs} turns {before} into {after}, which the next {runs.split()[0]} does"
            " not take; shapes must stay, and x must come in the compute dtype"
        )
