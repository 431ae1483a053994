"""Weights of pipeline stages that are gathered over `fsdp` once, instead of at each tick.

The gathered weights stay in memory until the backward pass has ended, as with MaxText's
`pipeline_fsdp_ag_once`. Gradients are scattered at each tick and added up as the weights are split.
"""

from __future__ import annotations

from typing import Any

import jax

from layerkit.base.base_layer import PARAMS, BaseLayer
from layerkit.base.sharding import BoundSharding, LogicalAxes, ShardingRules
from layerkit.base.weights import logical_axes


class GatheredWeights:
    """Layouts of the weights of a stage. Weights of experts stay split.

    Args:
      stage: Unbound layer of one stage.
      stacked: Logical axes before those of a weight of one stage, outermost first.
      sharding: Sharding of the model; None leaves all weights as they are.
      owner: Path of the pipeline, for error messages.
    """

    def __init__(
        self,
        stage: BaseLayer,
        *,
        stacked: tuple[str, ...],
        sharding: BoundSharding | None,
        owner: str,
    ) -> None:
        """Read the logical axes of the weights of the stage."""
        self._sharding, self._stacked, self._owner = sharding, stacked, owner
        if sharding is not None:
            self._whole = BoundSharding(sharding.mesh, _without_rows(sharding.rules))
            self._axes = logical_axes(jax.eval_shape(stage.init_boxed, jax.random.key(0))[PARAMS])

    def gather(self, weights: Any) -> Any:
        """Gather the stacked weights of all stages; their gradients stay split."""
        return self._lay_out(weights, self._stacked, is_gathered=True)

    def scatter_gradients(self, weights: Any) -> Any:
        """Return the gathered weights of one stage, whose gradients are scattered.

        Each tick needs this. Otherwise the loop over ticks adds up whole gradients.
        """
        return self._lay_out(weights, (), is_gathered=False)

    def _lay_out(self, weights: Any, stacked: tuple[str, ...], *, is_gathered: bool) -> Any:
        sharding, owner = self._sharding, self._owner
        if sharding is None:
            return weights

        def lay_out(axes: LogicalAxes | None, weight: jax.Array) -> jax.Array:
            # Experts gather their own weights in `shard_map`.
            if axes is None or "expert" in axes:
                return weight
            names = (*stacked, *axes)

            @jax.custom_vjp
            def place(x: jax.Array) -> jax.Array:
                return self._whole.constrain(x, names, owner=owner) if is_gathered else x

            place.defvjp(
                lambda x: (place(x), None),
                lambda _, gradient: (sharding.constrain(gradient, names, owner=owner),),
            )
            placed: jax.Array = place(weight)
            return placed

        return jax.tree.map(
            lay_out, self._axes, weights, is_leaf=lambda x: x is None or isinstance(x, tuple)
        )


def _without_rows(rules: ShardingRules) -> ShardingRules:
    """Return rules that split no weight over the mesh axes of rows."""
    rows = rules.mesh_axes("batch")
    names = [name for name, _ in rules.table]
    return ShardingRules.of(
        **{name: [axis for axis in rules.mesh_axes(name) if axis not in rows] for name in names}
    )
