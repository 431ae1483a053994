"""Calls of Optax optimizers, and properties of an optimizer that are found by tracing it.

An optimizer may need more than gradients, state and weights. The learner passes the loss as `value`
and the gradient before clipping as `grad`, which are the names in Optax. A function that evaluates
the loss at other weights, as line searches need, is not available.
"""

from __future__ import annotations

import enum
import inspect
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonState, ScheduleFreeState, schedule_free_eval_params

from layerkit.errors import ConfigError

# Primitives whose results mix several entries of an array.
_MIXING = re.compile(
    r"reduce_(?!precision).*|arg(max|min)|cum.*|dot_general|conv_general.*|sort|top_k|fft|qr|lu"
    r"|svd|eigh?|cholesky.*|triangular_solve|householder.*|schur|tridiagonal.*"
)
# Parameters of an equation that hold the called function.
_CALLED = ("jaxpr", "call_jaxpr", "fun_jaxpr")
_Labels = frozenset[int]


class Reach(enum.Enum):
    """The inputs that the update of one entry of a weight depends on.

    Attributes:
      ENTRY: Gradient of that entry (SGD, Adam, Lion); how weights are stacked does not matter.
      TENSOR: The whole gradient or weight (Adafactor, LAMB, a cap on the update's RMS).
    """

    ENTRY = "entry"
    TENSOR = "tensor"
    TREE = "tree"


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
    takes_any = any(each.kind is each.VAR_KEYWORD for each in declared.values())
    extra = {name: value for name, value in extra.items() if takes_any or name in declared}
    return transformation.update(grads, state, params, **extra)


def check_usable(transformation: optax.GradientTransformation, params: Any, *, owner: str) -> None:
    """Raise `ConfigError` if the learner cannot use an optimizer, found with shapes alone."""
    shapes, loss = _abstract(params), jax.ShapeDtypeStruct((), jnp.float32)

    def update_once(grads: Any, state: Any, params: Any, loss: Any) -> tuple[Any, Any]:
        return update(transformation, grads, state, params, raw_grads=grads, loss=loss)

    try:
        state = jax.eval_shape(transformation.init, shapes)
        is_muon = bool(_instances(state, MuonState))
        if not is_muon:
            updates, new_state = jax.eval_shape(update_once, shapes, state, shapes, loss)
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        line = str(error).strip().partition("\n")[0]
        raise ConfigError(
            "the optimizer fails with the arguments (gradients, state, weights, value=loss,"
            f" grad=gradients): {type(error).__name__}: {line}",
            owner=owner,
            hint="Use an optimizer that needs no other arguments, such as optax.adamw.",
        ) from error
    if is_muon:
        raise ConfigError(
            "optax.contrib.muon is not supported, because it would update attention and expert"
            " weights, which have three dimensions, by Adam, and a tied embedding by Muon",
            owner=owner,
            hint="Use another optimizer, such as optax.adamw.",
        )
    # The dtypes of updates may differ, because Optax converts sums to the dtypes of the weights.
    if _structure(shapes, with_dtypes=False) != _structure(updates, with_dtypes=False):
        problem = "the optimizer's updates differ in structure or shape from the weights"
        raise ConfigError(problem, owner=owner)
    if _structure(state) != _structure(new_state):
        problem = "the optimizer's update changes the structure, shape or dtype of its state"
        raise ConfigError(problem, owner=owner)
    for average in _instances(state, ScheduleFreeState):
        if _structure(average.z)[0] != _structure(shapes)[0]:
            raise ConfigError(
                "schedule-free is applied to some of the weights only, as by optax.masked or"
                " optax.partition, so its averages cannot be evaluated",
                owner=owner,
                hint="Give these weights an AuxiliaryOptimizer.",
            )


def steps_taken(state: Any) -> jax.Array | None:
    """Return the step count of an optimizer's schedule; None if it is unknown."""
    # The count of moments may differ from that of the schedule, as after `load_step`.
    schedules = _instances(
        state, (optax.ScaleByScheduleState, optax.InjectStatefulHyperparamsState)
    )
    counts = [each.count for each in schedules] or [
        count for _, count in optax.tree_utils.tree_get_all_with_path(state, "count")
    ]
    return jnp.max(counts[0]) if counts else None


def is_schedule_free(state: Any) -> bool:
    """Return whether an optimizer's state, of any leaves, has schedule-free averages."""
    return bool(_instances(state, ScheduleFreeState))


def evaluated(state: Any, params: Any) -> Any:
    """Return the weights to evaluate, decode and export with, in the dtypes of `params`."""
    for average in _instances(state, ScheduleFreeState):
        found = schedule_free_eval_params(average, params)
        params = jax.tree.map(lambda mean, leaf: mean.astype(leaf.dtype), found, params)
    return params


def reach_of(transformation: optax.GradientTransformation, params: Any) -> Reach:
    """Return what the updates of a transformation depend on, by tracing it with shapes.

    They may depend on earlier gradients and weights through the state.
    """
    shapes = _abstract(params)
    state = jax.eval_shape(transformation.init, shapes)
    closed = jax.make_jaxpr(
        lambda grads, params, state, loss: update(
            transformation, grads, state, params, raw_grads=grads, loss=loss
        )
    )(shapes, shapes, state, jax.ShapeDtypeStruct((), jnp.float32))
    count = len(jax.tree.leaves(shapes))
    own = [frozenset({index}) for index in range(count)]
    nothing: _Labels = frozenset()
    of_state = [nothing] * len(jax.tree.leaves(state))
    while True:
        reached, mixes = _follow(closed.jaxpr, [*own, *own, *of_state, nothing])
        assert len(reached) == count + len(of_state)
        grown = [old | new for old, new in zip(of_state, reached[count:], strict=True)]
        if grown == of_state:
            break
        of_state = grown
    if any(not labels <= mine for labels, mine in zip(reached[:count], own, strict=True)):
        return Reach.TREE
    return Reach.TENSOR if mixes else Reach.ENTRY


def _follow(jaxpr: Any, labels: Sequence[_Labels]) -> tuple[list[_Labels], bool]:
    """Return the weights that reach each result, and whether entries of any of them are mixed."""
    found: dict[Any, _Labels] = dict(zip(jaxpr.invars, labels, strict=True))
    mixes = False

    def labels_of(atom: Any) -> _Labels:
        # Literals are not hashable, and depend on nothing.
        return frozenset() if hasattr(atom, "val") else found.get(atom, frozenset())

    for equation in jaxpr.eqns:
        arguments = [labels_of(atom) for atom in equation.invars]
        together = frozenset[int]().union(*arguments)
        results, inner_mixes = _follow_called(equation, arguments, together)
        named = _MIXING.fullmatch(equation.primitive.name) is not None
        mixes |= bool(together) and (named or inner_mixes)
        found.update(zip(equation.outvars, results, strict=True))
    return [labels_of(atom) for atom in jaxpr.outvars], mixes


def _follow_called(
    equation: Any, arguments: list[_Labels], together: _Labels
) -> tuple[list[_Labels], bool]:
    called: list[Any] = [
        getattr(inner, "jaxpr", inner)
        for value in equation.params.values()
        for inner in (value if isinstance(value, (tuple, list)) else (value,))
        if hasattr(getattr(inner, "jaxpr", inner), "eqns")
    ]
    is_call = len(called) == 1 and any(key in equation.params for key in _CALLED)
    if is_call and len(called[0].invars) == len(arguments) and equation.primitive.name != "scan":
        return _follow(called[0], arguments)
    if equation.primitive.name == "cond":
        # The result depends on the first argument too, which selects the branch.
        branches = [_follow(branch, arguments[1:]) for branch in called]
        results = [
            arguments[0].union(*labels)
            for labels in zip(*(reached for reached, _ in branches), strict=True)
        ]
        return results, any(mixes for _, mixes in branches)
    # In a loop, each argument may reach each result.
    mixes = any(_follow(inner, [together] * len(inner.invars))[1] for inner in called)
    return [together] * len(equation.outvars), mixes


def _instances(state: Any, kind: Any) -> list[Any]:
    leaves = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, kind))
    return [leaf for leaf in leaves if isinstance(leaf, kind)]


def _abstract(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


def _structure(tree: Any, *, with_dtypes: bool = True) -> tuple[Any, list[Any]]:
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(leaf.shape, leaf.dtype if with_dtypes else None) for leaf in leaves]


def is_on_host(x: Any) -> bool:
    """Return whether an array of a traced step is in host memory."""
    return bool(jax.typeof(x).memory_space == jax.memory.Space.Host)
