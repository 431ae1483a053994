"""The state with which a run starts: some values are read, the others initialized randomly.

Names are compared before the training step is compiled. Each value is read straight into its
sharding on the mesh, so that no host holds more than its devices need.
"""

from __future__ import annotations

import functools
import logging
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import optax
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import NamedSharding, PartitionSpec

from layerkit.base.base_layer import BaseLayer
from layerkit.base.weight_formats import WeightFormat, scale_path
from layerkit.errors import UserError
from layerkit.layers.quantization.lora import LORA_WEIGHTS
from layerkit.layers.quantization.stored_weights import round_like
from layerkit_runner.checkpointing.stored_state import OPT_STATE, LeafPath, join, named_leaves
from layerkit_runner.errors import UsageError, as_usage_error
from layerkit_runner.init_from.matching import PARAMS, InitialValue, Matched, match
from layerkit_runner.init_from.settings import InitFrom
from layerkit_runner.init_from.sources import StoredAdapters, open_sources
from layerkit_runner.step.task import SingleTask
from layerkit_runner.step.train_state import (
    COPY_OF,
    RANDOM_INIT,
    FirstState,
    Provenance,
    TrainState,
)

if TYPE_CHECKING:
    from layerkit_runner.init_from.sources import StoredValues
    from layerkit_runner.partitioning.partitioner import Partitioner

_LOG = logging.getLogger(__name__)

Report = Callable[[str], None]


def plan_first_state(
    partitioner: Partitioner,
    task: SingleTask,
    *,
    weights: Any = None,
    report: Report = _LOG.warning,
) -> Callable[[], FirstState]:
    """Find the initial weights, and return a function that reads or initializes them.

    `weights` replace `task.initial_weights`. `report` receives lines about damaged checkpoints.
    """
    source = task.initial_weights if weights is None else weights
    if source is None:
        return lambda: FirstState(partitioner.init_fn(task)())
    state = partitioner.abstract_stored_state(task)
    matched, state = _match(source, state, task, report)
    return lambda: _read_match(partitioner, task, state, matched)


def weight_readers(
    partitioner: Partitioner, task: SingleTask, source: InitFrom
) -> tuple[dict[LeafPath, Callable[[], jax.Array]], int]:
    """Return a function for each value of a model that reads it, and the step of the source.

    Paths start with the field of the state, such as `("params", "lm", "w")`.
    """
    state = partitioner.abstract_stored_state(task)
    matched = _match(source, state, task, _LOG.warning)[0]

    def read(value: InitialValue) -> jax.Array:
        stored = value.stored.read(_stored_specs(value.stored, [value]))
        return _compute(value, [stored[path] for path in value.paths])

    readers: dict[LeafPath, Callable[[], jax.Array]] = {
        path: functools.partial(read, value) for path, value in matched.values.items()
    }
    steps = (value.stored.step for value in matched.values.values())
    return readers, next(steps, None) or 0


def _match(
    source: InitFrom, state: TrainState, task: SingleTask, report: Report
) -> tuple[Matched, TrainState]:
    """Return the origins of all values, and the state with the dtypes in which they are read."""
    with as_usage_error(UserError, owner=source.label):
        optimizer = task.train.learner.transformation
        opened = open_sources(
            source.sources, state, report=report, optimizer=optimizer, model=task.model
        )
    has_integers = any(
        path[0] == PARAMS and jnp.issubdtype(leaf.dtype, jnp.integer)
        for one in opened
        for path, leaf in one.stored.leaves.items()
    )
    if has_integers and any(
        path[-1] == "lora_magnitude" for one in opened for path in one.stored.leaves
    ):
        hint = "Read floating weights; task.model.weight_format rounds them afterwards."
        problem = "DoRA needs the norms of weights, which are integers in the source"
        raise UsageError(problem, owner=source.label, hint=hint)
    if not has_integers:
        state = _floating_weights(task.model, state)
    matched = match(source, opened, state, model=task.model)
    reads_adapters = any(re.fullmatch(LORA_WEIGHTS, join(path[1:])) for path in matched.values)
    if reads_adapters and getattr(task.model, "reference", None) == "base":
        problem = "the reference would be the model without these adapters, not that of the start"
        hint = "Set --fdl.task.model.reference=frozen, which copies the adapters of the start."
        raise UsageError(problem, owner=source.label, field="task.model.reference", hint=hint)
    return matched, state


def _read_match(
    partitioner: Partitioner, task: SingleTask, state: TrainState, matched: Matched
) -> FirstState:
    sources = [*dict.fromkeys(initial.stored for initial in matched.values.values())]
    values = [one.read(_stored_specs(one, matched.values.values())) for one in sources]

    def init(read: Sequence[Mapping[LeafPath, jax.Array]]) -> TrainState:
        by_source = dict(zip(sources, read, strict=True))
        computed = {
            target: _compute(initial, [by_source[initial.stored][path] for path in initial.paths])
            for target, initial in matched.values.items()
        }
        for path, initial in matched.values.items():
            if isinstance(initial.stored, StoredAdapters):
                relative = initial.stored.placed.relative(path, computed)
                computed[path] = relative.astype(computed[path].dtype)
        return _assemble(task, _rounded(task.model, computed, stored_leaves), matched.step)

    stored_leaves = named_leaves(partitioner.abstract_stored_state(task))
    make = partitioner.jit_making(task, init, donate_argnums=0)
    with warnings.catch_warnings():
        # Values that are converted, indexed or stacked do not become parts of the state.
        warnings.filterwarnings("ignore", "Some donated buffers were not usable")
        made = task.set_config_numbers(make(values))
    return FirstState(made, matched.step, _provenance(state, matched))


def _stored_specs(
    stored: StoredValues, initial_values: Iterable[InitialValue]
) -> dict[LeafPath, jax.ShapeDtypeStruct]:
    """Return the values to read of a source: stored shapes under the shardings of the state."""
    leaves: dict[LeafPath, jax.ShapeDtypeStruct] = {}
    for value in initial_values:
        for path in value.paths if value.stored is stored else ():
            spec, sharding = stored.leaves[path], _stored_sharding(value)
            leaves.setdefault(path, jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=sharding))
    return leaves


def _stored_sharding(value: InitialValue) -> NamedSharding:
    """Return the sharding of the stored value; axes that are indexed or stacked are not split."""
    sharding = value.target.sharding
    assert isinstance(sharding, NamedSharding)
    axes = [*sharding.spec, *[None] * (len(value.target.shape) - len(sharding.spec))]
    kept = sum(isinstance(index, tuple) for index in value.origin.indices)
    if value.origin.is_stacked:
        axes = axes[1:]
    axes = [*[None] * len(value.origin.indices), *axes[kept:]]
    return NamedSharding(sharding.mesh, PartitionSpec(*axes))


def _compute(initial: InitialValue, stored: Sequence[jax.Array]) -> jax.Array:
    """Compute a value of the state from stored ones."""
    value = jnp.stack(stored) if initial.origin.is_stacked else stored[0]
    # From the last axis to the first, so that the positions of the axes in front do not change.
    for axis, index in reversed(list(enumerate(initial.origin.indices))):
        several = index if isinstance(index, tuple) else (index,)
        value = jnp.take(value, jnp.array(several), axis=axis)
        if not isinstance(index, tuple):
            value = jnp.squeeze(value, axis)
    return value.astype(initial.target.dtype)


def _assemble(task: SingleTask, values: Mapping[LeafPath, jax.Array], step: int) -> TrainState:
    """Compute the first state; the optimizer is initialized from these weights."""
    weights = {path[1:]: value for path, value in values.items() if path[0] == PARAMS}
    key = task.first_key()
    state = task.init_state(key, weights=unflatten_dict(weights) if weights else None)
    if step:
        state = state.replace(step=jnp.int32(step), opt_state=_set_schedules(state.opt_state, step))
    leaves = {path: values.get(path, leaf) for path, leaf in named_leaves(state).items()}
    state = jax.tree.unflatten(jax.tree.structure(state), list(leaves.values()))
    averages = task.train.learner.init_ema(state.non_trainable)
    return state.replace(ema_statistics=averages)


def _set_schedules(opt_state: Any, step: int) -> Any:
    """Return an optimizer state whose schedules are at `step`; moments keep their first values."""
    kinds = (optax.ScaleByScheduleState, optax.InjectStatefulHyperparamsState)

    def visit(node: Any) -> Any:
        if not isinstance(node, kinds):
            return node
        node = node._replace(count=jnp.full_like(node.count, step))
        if isinstance(node, optax.InjectStatefulHyperparamsState):
            states = optax.tree_utils.tree_set(node.hyperparams_states, count=node.count)
            node = node._replace(hyperparams_states=states, inner_state=visit_all(node.inner_state))
        return node

    def visit_all(tree: Any) -> Any:
        return jax.tree.map(visit, tree, is_leaf=lambda node: isinstance(node, kinds))

    return visit_all(opt_state)


def _provenance(state: TrainState, matched: Matched) -> Provenance:
    values = matched.values
    converted: dict[str, list[str]] = {}
    for path, one in values.items():
        if one.stored_dtype != one.target.dtype:
            dtypes = f"{one.stored_dtype.name} → {one.target.dtype.name}"
            converted.setdefault(dtypes, []).append(join(path[1:]))
    weights = {join(path[1:]): str(one) for path, one in values.items() if path[0] != OPT_STATE}
    weights |= {join(path[1:]): RANDOM_INIT for path in matched.drawn}
    weights |= {join(path): COPY_OF + join(one) for path, one in matched.copied.items()}
    folders = (one.stored.hugging_face for one in values.values())
    return Provenance(
        weights=weights,
        opt_state={
            join(path[1:]): str(one) for path, one in values.items() if path[0] == OPT_STATE
        },
        step=matched.step_from,
        converted={dtypes: tuple(names) for dtypes, names in converted.items()},
        num_opt_state=len(jax.tree.leaves(state.opt_state)),
        hugging_face=next(filter(None, folders), None),
    )


def _floating_weights(model: BaseLayer, state: TrainState) -> TrainState:
    """Return a state that describes the weights of a model that stores all of them in floats."""
    if model.weight_format is None:
        return state
    variables = jax.eval_shape(model.clone(weight_format=None).init, jax.random.key(0))
    stored, plain = flatten_dict(state.params), flatten_dict(variables[PARAMS])
    params = {
        path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=stored[path].sharding)
        for path, leaf in plain.items()
    }
    return state.replace(params=unflatten_dict(params))


def _rounded(
    model: BaseLayer, values: Mapping[LeafPath, jax.Array], like: Mapping[LeafPath, Any]
) -> dict[LeafPath, jax.Array]:
    """Return the integers and scales of floating weights, and all other values unchanged."""
    rounded = dict(values)
    for path, value in values.items():
        is_float = jnp.issubdtype(value.dtype, jnp.floating)
        if path in like and is_float and jnp.issubdtype(like[path].dtype, jnp.integer):
            kind, scale = WeightFormat.parse(model.weight_format).kind, scale_path(path)
            rounded[path], rounded[scale] = round_like(value, like[path], like[scale], kind=kind)
    return rounded
