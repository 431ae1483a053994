"""How far an optimizer looks: at single entries, at whole tensors, or across weights.

An Optax transformation does not say, but its program does: what a reduction is taken over, and
which gradients reach which updates. The program is traced with shapes alone, and nothing is run.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from layerkit_runner.optim import optimizer_calls

# Primitives in whose results several entries of an array meet.
_MIXING = re.compile(
    r"reduce_(?!precision).*|arg(max|min)|cum.*|dot_general|conv_general.*|sort|top_k|fft|qr|lu"
    r"|svd|eigh?|cholesky.*|triangular_solve|householder.*|schur|tridiagonal.*"
)
# Keys of the parameters of an equation under which JAX keeps the function that it calls.
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


def reach_of(transformation: optax.GradientTransformation, params: Any) -> Reach:
    """How far a transformation looks when it updates `params`.

    Args:
      transformation: Any optimizer.
      params: Weights, or their shapes and dtypes.
    """
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params)
    state = jax.eval_shape(transformation.init, shapes)
    closed, out = jax.make_jaxpr(
        lambda grads, params, state, loss: optimizer_calls.update(
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
    """Which weights reach each result, and whether entries of any of them meet on the way.

    Args:
      jaxpr: An open jaxpr.
      labels: Of each of its arguments, the indices of the weights that it depends on.
    """
    found: dict[Any, _Labels] = dict(zip(jaxpr.invars, labels, strict=True))
    mixes = False

    def of(atom: Any) -> _Labels:
        # Literals are not hashable, and depend on nothing.
        return frozenset() if hasattr(atom, "val") else found.get(atom, frozenset())

    for equation in jaxpr.eqns:
        given = [of(atom) for atom in equation.invars]
        together = frozenset[int]().union(*given)
        results, inner_mixes = _follow_called(equation, given, together)
        named = _MIXING.fullmatch(equation.primitive.name) is not None
        mixes |= bool(together) and (named or inner_mixes)
        found.update(zip(equation.outvars, results, strict=True))
    return [of(atom) for atom in jaxpr.outvars], mixes


def _follow_called(
    equation: Any, given: list[_Labels], together: _Labels
) -> tuple[list[_Labels], bool]:
    """The same of one equation, which may call functions."""
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
        # What is chosen among depends on the choice too, the first argument.
        branches = [_follow(branch, given[1:]) for branch in called]
        results = [
            given[0].union(*labels)
            for labels in zip(*(reached for reached, _ in branches), strict=True)
        ]
        return results, any(mixes for _, mixes in branches)
    # Loops: whatever goes in may reach whatever comes out.
    mixes = any(_follow(inner, [together] * len(inner.invars))[1] for inner in called)
    return [together] * len(equation.outvars), mixes
