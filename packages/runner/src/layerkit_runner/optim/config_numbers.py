"""Numbers of an optimizer's config that its state holds, when a run restores that state.

Optax reads these from the config once, for the first state: those of `optax.inject_hyperparams`,
and `b1` of schedule-free optimizers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.tree_util import GetAttrKey

from layerkit.config.checks import require

_B1, _INJECTED = GetAttrKey("b1"), GetAttrKey("hyperparams")


def set_config_numbers(state: Any, init: Callable[[], Any]) -> Any:
    """Return a restored optimizer state with the injected hyperparameters of the config.

    Args:
      state: State of the optimizers; global arrays.
      init: Function that returns the first state, traced for its numbers alone.

    Raises:
      ConfigError: `b1` of a schedule-free optimizer differs. Its averages follow from the weights
        by `b1`: the update takes that of the config, and the evaluation that of the state.
    """
    paths, structure = jax.tree_util.tree_flatten_with_path(state)
    leaves = [leaf for _, leaf in paths]
    held = [i for i, (path, _) in enumerate(paths) if _INJECTED in path or path[-1:] == (_B1,)]
    if not held:
        return state

    def numbers() -> dict[int, jax.Array]:
        first = jax.tree.leaves(init())
        return {index: first[index] for index in held}

    for index, number in jax.device_get(jax.jit(numbers)()).items():
        leaf = leaves[index]
        if _INJECTED in paths[index][0]:
            whole = np.broadcast_to(number, leaf.shape).astype(leaf.dtype)
            leaves[index] = jax.make_array_from_callback(
                leaf.shape, leaf.sharding, whole.__getitem__
            )
        else:
            new, old = (np.ravel(x)[0].item() for x in (number, leaf.addressable_data(0)))
            expected = (
                f"{old:.6g}, as in the checkpoint, whose averages follow from the weights by it"
            )
            require(new == old, "Learner.optimizer", "b1", round(new, 6), expected)
    return jax.tree.unflatten(structure, leaves)
