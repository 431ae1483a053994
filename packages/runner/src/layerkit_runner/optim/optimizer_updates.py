"""How an optimizer of Optax is called, what its update depends on, and sums that round to a weight.

An optimizer may need more than gradients, state and weights. The learner passes the loss as `value`
and the gradient before clipping as `grad`, which are the names in Optax, and a function `hvp` that
multiplies a tree shaped like the weights by the Hessian of the loss. A function that evaluates the
loss at other weights, as line searches need, is not available.

A rule whose update of an entry depends on its whole tensor, as Adafactor's factors or LAMB's trust
ratio, treats each layer of a stack as a tensor of its own. Any other rule gives the same result for
a stack and for its layers.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import fiddle as fdl
import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonState, ScheduleFreeState, schedule_free_eval_params

from layerkit.config.checks import require
from layerkit.errors import UserError


def cast_like(tree: Any, like: Any) -> Any:
    """Return a tree of arrays in the dtypes of another."""
    return jax.tree.map(lambda leaf, other: leaf.astype(other.dtype), tree, like)


def update(
    transformation: optax.GradientTransformation,
    grads: Any,
    state: Any,
    params: Any,
    *,
    raw_grads: Any,
    loss: jax.Array | None,
    hvp: Callable[[Any], Any] | None = None,
) -> tuple[Any, Any]:
    """Return (updates, next state) of an optimizer, with the extra arguments that it takes."""
    extra: dict[str, Any] = {} if loss is None else {"value": loss, "grad": raw_grads}
    extra |= {} if hvp is None else {"hvp": hvp}
    declared = inspect.signature(transformation.update).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in declared.values())
    extra = {name: value for name, value in extra.items() if takes_any or name in declared}
    return transformation.update(grads, state, params, **extra)


def find_problem(
    transformation: optax.GradientTransformation, params: Any, stored: Any
) -> str | None:
    """Return why the learner cannot use an optimizer, by tracing it with shapes; None if it can.

    `params` have the dtypes in which optimizers compute, `stored` those of the state.
    """
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params)
    loss = jax.ShapeDtypeStruct((), jnp.float32)

    def update_once(grads: Any, state: Any, params: Any, loss: Any) -> tuple[Any, Any]:
        extra: dict[str, Any] = {"raw_grads": grads, "loss": loss, "hvp": lambda tangents: tangents}
        return update(transformation, grads, state, params, **extra)

    try:
        state = jax.eval_shape(transformation.init, shapes)
        updates, new_state = jax.eval_shape(update_once, shapes, state, shapes, loss)
    except UserError:
        raise
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        line = str(error).strip().partition("\n")[0]
        return f"the optimizer fails with (gradients, state, weights, value=loss): {line}"
    averages = instances(state, ScheduleFreeState)
    if instances(state, MuonState):
        name = "layerkit_runner.optim.matrix.muon.muon"
        return f"optax.contrib.muon trains weights of three dimensions by Adam; use {name}"
    # The dtypes of updates may differ, because Optax converts sums to the dtypes of the weights.
    if _structure(updates, with_dtypes=False) != _structure(shapes, with_dtypes=False):
        return "the optimizer's updates differ in structure or shape from the weights"
    if _structure(new_state) != _structure(state):
        return "the optimizer's update changes the structure, shape or dtype of its state"
    # Weights in float16 are computed in float32, but rounded to the nearest number.
    dtypes = {leaf.dtype for leaf in jax.tree.leaves(stored) if leaf.dtype == jnp.float16}
    dtypes |= {average.weight_sum.dtype for average in averages}
    if averages and any(jnp.finfo(dtype).bits < 32 for dtype in dtypes):
        fix = "store them in float32, or bfloat16 ones with Learner.stochastic_rounding=True"
        return f"schedule-free averages are lost at these dtypes of weights; {fix}"
    if any(_structure(average.z)[0] != _structure(shapes)[0] for average in averages):
        return "schedule-free for some of the weights: their averages cannot be evaluated"
    return None


def steps_taken(state: Any) -> jax.Array | None:
    """Return the step count of an optimizer's schedule; None if it is unknown."""
    # The count of moments may differ from that of the schedule, as after `load_step`.
    schedules = instances(state, (optax.ScaleByScheduleState, optax.InjectStatefulHyperparamsState))
    counts = [schedule.count for schedule in schedules] or [
        count for _, count in optax.tree_utils.tree_get_all_with_path(state, "count")
    ]
    return jnp.max(counts[0]) if counts else None


def is_schedule_free(state: Any) -> bool:
    """Return whether an optimizer's state, of any leaves, has schedule-free averages."""
    return bool(instances(state, ScheduleFreeState))


def refuse_schedule_free(owner: str, state: Any) -> None:
    """Raise `ConfigError` if the state of a wrapped optimizer has schedule-free averages.

    They follow from the weights, and so only from updates that are not changed afterwards.
    """
    expected = "one that is not schedule-free, since its updates are changed"
    require(not is_schedule_free(state), owner, "optimizer", "schedule-free", expected)


def evaluated(state: Any, params: Any) -> Any:
    """Return the weights to evaluate, decode and export with, in the dtypes of `params`."""
    for average in instances(state, ScheduleFreeState):
        means = schedule_free_eval_params(average, params)
        params = jax.tree.map(lambda mean, leaf: mean.astype(leaf.dtype), means, params)
    return params


def instances(state: Any, kind: Any) -> list[Any]:
    """Return the nodes of a state that are of a class, or of one of several."""
    leaves = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, kind))
    return [leaf for leaf in leaves if isinstance(leaf, kind)]


def _structure(tree: Any, *, with_dtypes: bool = True) -> tuple[Any, list[Any]]:
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(leaf.shape, leaf.dtype if with_dtypes else None) for leaf in leaves]


def is_on_host(x: Any) -> bool:
    """Return whether an array of a traced step is in host memory."""
    return bool(jax.typeof(x).memory_space == jax.memory.Space.Host)


_BY_ENTRY = (
    *("adabelief", "adadelta", "adagrad", "adam", "adamax", "adamaxw", "adamw", "adan", "amsgrad"),
    *("lion", "nadam", "nadamw", "optimistic_gradient_descent", "radam", "rmsprop", "rprop", "sgd"),
    *("sign_sgd", "signum", "yogi", "scale_by_learning_rate", "acprop", "ademamix"),
    *("schedule_free_adamw", "schedule_free_sgd"),
)
_BY_TENSOR = ("adafactor", "fromage", "lamb", "lars", "novograd", "sm3")
_OPTAX = dict.fromkeys(_BY_ENTRY, False) | dict.fromkeys(_BY_TENSOR, True)
_DECLARED: dict[Any, Callable[..., bool | None]] = {}

Function = TypeVar("Function", bound=Callable[..., Any])


def declare_per_layer(rule: Callable[..., bool | None]) -> Callable[[Function], Function]:
    """Return a decorator of a function that makes an optimizer.

    Args:
      rule: A function of the optimizer's arguments by name. It returns True if the update of an
        entry depends on its whole tensor, and None if that is unknown.
    """

    def declare(function: Function) -> Function:
        _DECLARED[function] = rule
        return function

    return declare


def per_layer_of(optimizer: Any) -> bool | None:
    """Return what an optimizer declares; None if it declares nothing.

    Args:
      optimizer: A function that makes an optimizer, a `Partial` of one, or what it was built to.
    """
    arguments: Mapping[str, Any] = {}
    if isinstance(optimizer, functools.partial):
        arguments = optimizer.keywords
        # A built `Partial` is the argument of a function.
        optimizer = optimizer.args[0] if optimizer.args else optimizer.func
    if isinstance(optimizer, fdl.Partial):
        optimizer, arguments = fdl.get_callable(optimizer), optimizer.__arguments__
    if getattr(optimizer, "__module__", "").startswith("optax.") and callable(optimizer):
        return _OPTAX.get(optimizer.__name__)
    rule = _DECLARED.get(optimizer)
    return None if rule is None else rule(**arguments)


def as_inner(*, optimizer: Any, **_: Any) -> bool | None:
    """Return what the wrapped optimizer declares."""
    return per_layer_of(optimizer)


def add_update(
    weight: jax.Array, update: jax.Array, *, key: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Return (weight + update in the dtype of the weight, change of the weight in float32).

    The sum is computed in float32. Its bfloat16 value is rounded stochastically with a `key`, and
    to the nearest number without. Both arrays are `[...]`.
    """
    wide = jnp.promote_types(jnp.result_type(weight, update), jnp.float32)
    old = weight.astype(wide)
    total = old + update.astype(wide)
    if key is not None and weight.dtype == jnp.bfloat16:
        new = round_stochastically(total, key)
    elif jnp.finfo(weight.dtype).bits < jnp.finfo(wide).bits:
        # Unlike this, XLA may leave out a cast to a narrower dtype and back.
        number = jnp.finfo(weight.dtype)
        new = jax.lax.reduce_precision(total, number.nexp, number.nmant).astype(weight.dtype)
    else:
        new = total
    return new, new.astype(wide) - old


def round_stochastically(x: jax.Array, key: jax.Array) -> jax.Array:
    """Return float32 `[...]` in bfloat16, rounded up or down so that the expected value is `x`.

    Updates of weights and increments of a second moment are often smaller than half of the distance
    between two bfloat16 numbers, so that rounding to the nearest would lose them. Stochastic
    rounding is by Gupta et al., 2015, arXiv:1502.02551.
    """
    dropped_bits = 0xFFFF
    noise = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) + noise
    rounded = jax.lax.bitcast_convert_type(bits & ~jnp.uint32(dropped_bits), jnp.float32)
    return jnp.where(jnp.isfinite(x), rounded, x).astype(jnp.bfloat16)


def choose(is_valid: jax.Array, new: Any, old: Any) -> Any:
    """Return `new` where the step is valid and `old` where it is not; both are trees of arrays."""
    return jax.tree.map(lambda a, b: jnp.where(is_valid, a, b), new, old)
