"""Calls of Optax optimizers, and properties of their states.

An optimizer may need more than gradients, state and weights. The learner passes the loss as `value`
and the gradient before clipping as `grad`, which are the names in Optax. A function that evaluates
the loss at other weights, as line searches need, is not available.
"""

from __future__ import annotations

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonState, ScheduleFreeState, schedule_free_eval_params


def update(
    transformation: optax.GradientTransformation,
    grads: Any,
    state: Any,
    params: Any,
    *,
    raw_grads: Any,
    loss: jax.Array | None,
) -> tuple[Any, Any]:
    """Return (updates, next state) of an optimizer, with the extra arguments that it takes."""
    extra = {} if loss is None else {"value": loss, "grad": raw_grads}
    declared = inspect.signature(transformation.update).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in declared.values())
    extra = {name: value for name, value in extra.items() if takes_any or name in declared}
    return transformation.update(grads, state, params, **extra)


def find_problem(transformation: optax.GradientTransformation, params: Any) -> str | None:
    """Return why the learner cannot use an optimizer, by tracing it with shapes; None if it can."""
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params)
    loss = jax.ShapeDtypeStruct((), jnp.float32)

    def update_once(grads: Any, state: Any, params: Any, loss: Any) -> tuple[Any, Any]:
        return update(transformation, grads, state, params, raw_grads=grads, loss=loss)

    try:
        state = jax.eval_shape(transformation.init, shapes)
        updates, new_state = jax.eval_shape(update_once, shapes, state, shapes, loss)
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        line = str(error).strip().partition("\n")[0]
        return f"the optimizer fails with (gradients, state, weights, value=loss): {line}"
    averages = [average.z for average in _instances(state, ScheduleFreeState)]
    if _instances(state, MuonState):
        return "optax.contrib.muon trains weights of three dimensions, as of attention, by Adam"
    # The dtypes of updates may differ, because Optax converts sums to the dtypes of the weights.
    if _structure(updates, with_dtypes=False) != _structure(shapes, with_dtypes=False):
        return "the optimizer's updates differ in structure or shape from the weights"
    if _structure(new_state) != _structure(state):
        return "the optimizer's update changes the structure, shape or dtype of its state"
    if any(_structure(average)[0] != _structure(shapes)[0] for average in averages):
        return "schedule-free for some of the weights: their averages cannot be evaluated"
    return None


def steps_taken(state: Any) -> jax.Array | None:
    """Return the step count of an optimizer's schedule; None if it is unknown."""
    # The count of moments may differ from that of the schedule, as after `load_step`.
    schedules = _instances(
        state, (optax.ScaleByScheduleState, optax.InjectStatefulHyperparamsState)
    )
    counts = [schedule.count for schedule in schedules] or [
        count for _, count in optax.tree_utils.tree_get_all_with_path(state, "count")
    ]
    return jnp.max(counts[0]) if counts else None


def is_schedule_free(state: Any) -> bool:
    """Return whether an optimizer's state, of any leaves, has schedule-free averages."""
    return bool(_instances(state, ScheduleFreeState))


def evaluated(state: Any, params: Any) -> Any:
    """Return the weights to evaluate, decode and export with, in the dtypes of `params`."""
    for average in _instances(state, ScheduleFreeState):
        means = schedule_free_eval_params(average, params)
        params = jax.tree.map(lambda mean, leaf: mean.astype(leaf.dtype), means, params)
    return params


def _instances(state: Any, kind: Any) -> list[Any]:
    leaves = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, kind))
    return [leaf for leaf in leaves if isinstance(leaf, kind)]


def _structure(tree: Any, *, with_dtypes: bool = True) -> tuple[Any, list[Any]]:
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(leaf.shape, leaf.dtype if with_dtypes else None) for leaf in leaves]


def is_on_host(x: Any) -> bool:
    """Return whether an array of a traced step is in host memory."""
    return bool(jax.typeof(x).memory_space == jax.memory.Space.Host)
