"""How the learner calls an Optax optimizer, and what it finds out about one by tracing it.

An optimizer may need more than gradients, state and weights. The learner passes the loss as `value`
and the gradient before clipping as `grad`, Optax's own names for them. A function that evaluates
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

from layerkit_runner.errors import UsageError

# Primitives whose results mix several entries of an array.
_MIXING = re.compile(
    r"reduce_(?!precision).*|arg(max|min)|cum.*|dot_general|conv_general.*|sort|top_k|fft|qr|lu"
    r"|svd|eigh?|cholesky.*|triangular_solve|householder.*|schur|tridiagonal.*"
)
# Parameters of an equation that hold the function that it calls.
_CALLED = ("jaxpr", "call_jaxpr", "fun_jaxpr")
_Labels = frozenset[int]


class Reach(enum.Enum):
    """What the update of one entry of a weight depends on.

    Attributes:
      ENTRY: That entry's gradient (SGD, Adam, Lion); how weights are stacked does not matter.
      TENSOR: The whole gradient or weight (Adafactor, LAMB, a cap on the update's RMS).
      TREE: Other weights' gradients too (a global norm).
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
    """Return (updates, next state) of an optimizer, with the extra arguments that are known.

    Args:
      transformation: The optimizer; one that takes no extra arguments gets none.
      grads: Gradients, clipped if the learner clips.
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
    shapes = _abstract(params)
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
    if _structure(shapes, with_dtypes=False) != _structure(updates, with_dtypes=False):
        raise UsageError(
            f"{field} cannot be used: its updates differ in structure or shape from its weights."
        )
    if _structure(state) != _structure(new_state):
        raise UsageError(
            f"{field} cannot be used: its state differs in structure, shape or dtype from its first"
            " state."
        )
    for average in _instances(state, ScheduleFreeState):
        if _structure(average.z)[0] != _structure(shapes)[0]:
            raise UsageError(
                f"{field}: schedule-free is applied to some of its weights only, as by"
                " optax.masked or optax.partition, and then its averages cannot be evaluated. Give"
                " these weights an AuxiliaryOptimizer of their own."
            )


def steps_taken(state: Any) -> jax.Array | None:
    """Return the step count of an optimizer's schedule; None if it is unknown.

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
    """Return whether an optimizer's state, of any leaves, has schedule-free averages.

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


def reach_of(transformation: optax.GradientTransformation, params: Any) -> Reach:
    """Return what the updates of a transformation depend on.

    Optax does not say, but the program does: what a reduction is taken over, and which gradients
    reach which updates. The program is traced with shapes alone; nothing runs.

    Args:
      transformation: The optimizer.
      params: Weights that it updates, or their shapes and dtypes.
    """
    shapes = _abstract(params)
    state = jax.eval_shape(transformation.init, shapes)
    closed, out = jax.make_jaxpr(
        lambda grads, params, state, loss: update(
            transformation, grads, state, params, raw_grads=grads, loss=loss
        )[0],
        return_shape=True,
    )(shapes, shapes, state, jax.ShapeDtypeStruct((), jnp.float32))
    count = len(jax.tree.leaves(shapes))
    own = [frozenset({index}) for index in range(count)]
    rest = len(closed.jaxpr.invars) - 2 * count
    reached, mixes = _follow(closed.jaxpr, [*own, *own, *[frozenset[int]()] * rest])
    assert len(reached) == len(jax.tree.leaves(out)) == count
    if any(not labels <= mine for labels, mine in zip(reached, own, strict=True)):
        return Reach.TREE
    return Reach.TENSOR if mixes else Reach.ENTRY


def _follow(jaxpr: Any, labels: Sequence[_Labels]) -> tuple[list[_Labels], bool]:
    """Return which weights reach each result, and whether entries of any of them are mixed.

    Args:
      jaxpr: An open jaxpr.
      labels: Indices of the weights that each of its arguments depends on.
    """
    found: dict[Any, _Labels] = dict(zip(jaxpr.invars, labels, strict=True))
    mixes = False

    def labels_of(atom: Any) -> _Labels:
        # Literals are not hashable, and depend on nothing.
        return frozenset() if hasattr(atom, "val") else found.get(atom, frozenset())

    for equation in jaxpr.eqns:
        given = [labels_of(atom) for atom in equation.invars]
        together = frozenset[int]().union(*given)
        results, inner_mixes = _follow_called(equation, given, together)
        named = _MIXING.fullmatch(equation.primitive.name) is not None
        mixes |= bool(together) and (named or inner_mixes)
        found.update(zip(equation.outvars, results, strict=True))
    return [labels_of(atom) for atom in jaxpr.outvars], mixes


def _follow_called(
    equation: Any, given: list[_Labels], together: _Labels
) -> tuple[list[_Labels], bool]:
    """Return the same as `_follow` for one equation, which may call functions."""
    called: list[Any] = [
        getattr(inner, "jaxpr", inner)
        for value in equation.params.values()
        for inner in (value if isinstance(value, (tuple, list)) else (value,))
        if hasattr(getattr(inner, "jaxpr", inner), "eqns")
    ]
    is_call = len(called) == 1 and any(key in equation.params for key in _CALLED)
    if is_call and len(called[0].invars) == len(given) and equation.primitive.name != "scan":
        return _follow(called[0], given)
    if equation.primitive.name == "cond":
        # The result depends on the first argument too, which selects the branch.
        branches = [_follow(branch, given[1:]) for branch in called]
        results = [
            given[0].union(*labels)
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


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0].rstrip('.')}"
