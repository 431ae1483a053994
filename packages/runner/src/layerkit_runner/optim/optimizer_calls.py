"""How the learner calls an Optax optimizer, and which optimizers it refuses.

An optimizer may need more than gradients, state and weights. The learner passes the loss as `value`
and the gradient before clipping as `grad`, Optax's own names for them. A function that evaluates
the loss at other weights, as line searches need, is not available.
"""

from __future__ import annotations

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonState, ScheduleFreeState, schedule_free_eval_params

from layerkit_runner.errors import UsageError


def update(
    transformation: optax.GradientTransformation,
    grads: Any,
    state: Any,
    params: Any,
    *,
    raw_grads: Any,
    loss: jax.Array | None,
) -> tuple[Any, Any]:
    """Return (updates, next state) of an optimizer, with the extra arguments that are known.

    Args:
      transformation: The optimizer; one that takes no extra arguments gets none.
      grads: Gradients, clipped where the learner clips.
      state: State of the optimizer.
      params: Weights.
      raw_grads: Gradients before clipping.
      loss: Loss at `params`, a scalar; None if it is unknown, and not passed then.
    """
    extra = {} if loss is None else {"value": loss, "grad": raw_grads}
    declared = inspect.signature(transformation.update).parameters
    takes_any = any(each.kind is each.VAR_KEYWORD for each in declared.values())
    taken = {name: given for name, given in extra.items() if takes_any or name in declared}
    return transformation.update(grads, state, params, **taken)


def check_usable(transformation: optax.GradientTransformation, params: Any, *, field: str) -> None:
    """Check with shapes alone that the learner can use an optimizer.

    Args:
      transformation: The optimizer.
      params: Weights that it updates, or their shapes and dtypes.
      field: What configures it, for messages.

    Raises:
      UsageError: It is Muon; it needs what the learner does not have; or its state or its updates
        do not keep their shapes.
    """
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params)
    try:
        state = jax.eval_shape(transformation.init, shapes)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{field}: its init fails: {_first_line(error)}") from error
    if _instances(state, MuonState):
        raise UsageError(
            f"{field}: optax.contrib.muon is not supported. It takes weights of two dimensions for"
            " matrices and updates all others by Adam at its own learning rate, so attention and"
            " expert weights, which have three, would not be trained by Muon, and a tied embedding"
            " would. Use another optimizer, such as optax.adamw."
        )
    loss = jax.ShapeDtypeStruct((), jnp.float32)
    try:
        updates, new_state = jax.eval_shape(
            lambda grads, state, params, loss: update(
                transformation, grads, state, params, raw_grads=grads, loss=loss
            ),
            shapes,
            state,
            shapes,
            loss,
        )
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"{field} cannot be used: its update fails with the arguments (gradients, state,"
            f" weights, value=loss, grad=gradients): {_first_line(error)}. Use an optimizer that"
            " needs no other arguments, such as optax.adamw."
        ) from error
    # Updates may have other dtypes than the weights, to whose dtypes Optax converts the sums.
    if _shapes(shapes) != _shapes(updates):
        raise UsageError(
            f"{field} cannot be used: its updates differ in structure or shape from its weights."
        )
    if _specs(state) != _specs(new_state):
        raise UsageError(
            f"{field} cannot be used: its state differs in structure, shape or dtype from its first"
            " state."
        )
    for average in _instances(state, ScheduleFreeState):
        if _specs(average.z)[0] != _specs(shapes)[0]:
            raise UsageError(
                f"{field}: schedule-free is applied to some of its weights only, as by"
                " optax.masked or optax.partition, and then its averages cannot be evaluated. Give"
                " these weights an AuxiliaryOptimizer of their own."
            )


def steps_taken(state: Any) -> jax.Array | None:
    """Return the count of updates by which an optimizer's schedule goes; None if it is unknown.

    Args:
      state: State of the optimizer; counts `[…]` of the layers of a stack are equal.
    """
    # Moments may be newer than the schedule, as in a run that begins with `load_step`.
    schedules = _instances(
        state, (optax.ScaleByScheduleState, optax.InjectStatefulHyperparamsState)
    )
    counts = [each.count for each in schedules] or [
        count for _, count in optax.tree_utils.tree_get_all_with_path(state, "count")
    ]
    return jnp.max(counts[0]) if counts else None


def is_schedule_free(state: Any) -> bool:
    """Return whether an optimizer's state, of arrays or anything else, has schedule-free averages.

    The weights that such an optimizer trains are not those to evaluate; see `evaluated`.
    """
    return bool(_instances(state, ScheduleFreeState))


def evaluated(state: Any, params: Any) -> Any:
    """Return the weights to evaluate, decode and export with, in the dtypes of `params`.

    Args:
      state: State of an optimizer.
      params: Weights as it trains them.
    """
    for average in _instances(state, ScheduleFreeState):
        found = schedule_free_eval_params(average, params)
        params = jax.tree.map(lambda mean, leaf: mean.astype(leaf.dtype), found, params)
    return params


def _instances(state: Any, kind: Any) -> list[Any]:
    leaves = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, kind))
    return [leaf for leaf in leaves if isinstance(leaf, kind)]


def _shapes(tree: Any) -> tuple[Any, list[Any]]:
    leaves, structure = jax.tree.flatten(tree)
    return structure, [leaf.shape for leaf in leaves]


def _specs(tree: Any) -> tuple[Any, list[Any]]:
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(leaf.shape, leaf.dtype) for leaf in leaves]


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0].rstrip('.')}"
