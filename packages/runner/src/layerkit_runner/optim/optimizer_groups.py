"""Groups of weights that are updated by the same optimizer and stacked in the same way.

Repeated and pipelined layers keep their weights stacked on leading axes. A rule that works on a
whole tensor is applied to each layer by itself (`jax.vmap`), so that training does not depend on
the layout of layers. Each group has an optimizer state.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax.traverse_util import flatten_dict, unflatten_dict

from layerkit.base.weights import is_box
from layerkit.config.checks import check_non_negative, require
from layerkit.errors import ConfigError
from layerkit_runner.optim import optimizer_updates
from layerkit_runner.optim.schedules import concrete_numbers
from layerkit_runner.optim.weight_selection import matching_paths

Path = tuple[str, ...]
Stacks = Mapping[Path, tuple[int, ...]]

MAIN = "main"

# Logical axes that `repeat` and `pipeline` of `layerkit.layers.transformer` add.
STACK_AXES = frozenset({"layers", "stage"})


def stacks_of(boxed: Any) -> dict[Path, tuple[int, ...]]:
    """Return the sizes of the leading stacked axes of each stacked weight, by path."""
    stacks: dict[Path, tuple[int, ...]] = {}
    for path, box in flatten_dict(boxed, is_leaf=lambda _, leaf: is_box(leaf)).items():
        depth = 0
        while is_box(box) and depth < len(box.axes) and box.axes[depth] in STACK_AXES:
            depth += 1
        if depth:
            stacks[path] = tuple(box.value.shape[:depth])
    return stacks


def map_stack(fn: Callable[..., Any], sizes: tuple[int, ...]) -> Callable[..., Any]:
    """Return a function of stacks, arrays `[*sizes, ...]`, that applies `fn` to each layer."""
    for _ in sizes:
        fn = jax.vmap(fn)
    return fn


def map_tensors(fn: Callable[[jax.Array], jax.Array], tree: Any, stacks: Stacks) -> Any:
    """Apply `fn` to each weight `[...]` of a tree, and to each layer of stacked weights."""
    flat = flatten_dict(tree)
    return unflatten_dict(
        {path: map_stack(fn, stacks.get(path, ()))(leaf) for path, leaf in flat.items()}
    )


@dataclasses.dataclass(frozen=True)
class NamedOptimizer:
    """An optimizer of a learner; `owner` names it in errors.

    `per_layer` is what the optimizer declares (`declare_per_layer`), `learning_rate` is None if the
    optimizer has its own, and `weights` is None for all that are left. `weights` are patterns of
    paths, or a function of the trained weights to a tree of booleans.
    """

    name: str
    owner: str
    transformation: optax.GradientTransformation
    per_layer: bool | None
    learning_rate: Any = None
    weights: Sequence[str] | Callable[[Any], Any] | None = None

    @classmethod
    def from_config(cls, config: Any, name: str, owner: str, weights: Any) -> NamedOptimizer:
        """Return the optimizer of the fields `optimizer` and `learning_rate` of a config."""
        optimizer, rate, label = config.optimizer, config.learning_rate, owner.partition(".")[0]
        expected = "an Optax optimizer, such as Partial(optax.adamw)"
        require(optimizer is not None, label, "optimizer", optimizer, expected)
        if isinstance(optimizer, optax.GradientTransformation):
            expected = "None with an optimizer that is not a Partial and has its own learning rate"
            require(rate is None, label, "learning_rate", rate, expected)
            transformation = optimizer
        else:
            require(rate is not None, label, "learning_rate", rate, "a number, or a schedule")
            check_non_negative(label, **concrete_numbers(learning_rate=rate))
            transformation = optimizer(learning_rate=rate)
        per_layer = optimizer_updates.per_layer_of(optimizer)
        return cls(name, owner, transformation, per_layer, rate, weights)

    def rate(self, step: jax.Array) -> jax.Array | None:
        """Return the float32 learning rate at `step`; None if it is unknown."""
        if self.learning_rate is None:
            return None
        rate = self.learning_rate(step) if callable(self.learning_rate) else self.learning_rate
        return jnp.asarray(rate, jnp.float32)


@dataclasses.dataclass(frozen=True)
class _Group:
    optimizer: NamedOptimizer
    paths: tuple[Path, ...]
    sizes: tuple[int, ...]

    def select(self, flat: Mapping[Path, Any]) -> Any:
        return unflatten_dict({path: flat[path] for path in self.paths})


class OptimizerGroups:
    """All optimizers of a learner as one.

    `per_layer` is True if each layer of a stack is a tensor; None for what each optimizer declares.
    """

    def __init__(self, optimizers: Sequence[NamedOptimizer], *, per_layer: bool | None):
        """Combine optimizers, the main one first."""
        self._optimizers = tuple(optimizers)
        self._per_layer = per_layer

    def check(self, params: Any, *, stored: Any) -> None:
        """Raise `ConfigError` if an optimizer cannot update its weights; traces each of them.

        `params` have the dtypes in which optimizers compute, `stored` those of the state.
        """
        flat, flat_stored = flatten_dict(params), flatten_dict(stored)
        for optimizer, paths in zip(self._optimizers, self.assign(flat), strict=True):
            parts = (unflatten_dict({path: x[path] for path in paths}) for x in (flat, flat_stored))
            if problem := optimizer_updates.find_problem(optimizer.transformation, *parts):
                hint = "Use optax.adamw or another, or an AuxiliaryOptimizer for some weights."
                raise ConfigError(problem, owner=optimizer.owner, hint=hint)

    def init(self, params: Any, stacks: Stacks) -> Any:
        """Return the initial state: that of the only group, or a dict by group name."""
        flat, states = flatten_dict(params), {}
        for name, group in self._divide(params, stacks).items():
            init = map_stack(group.optimizer.transformation.init, group.sizes)
            states[name] = init(group.select(flat))
        return _bare(states)

    def update(
        self,
        grads: Any,
        state: Any,
        params: Any,
        stacks: Stacks,
        *,
        raw_grads: Any,
        loss: jax.Array | None,
        select: Callable[[Any, Any], Any],
        hvp: Callable[[Any], Any] | None = None,
    ) -> tuple[Any, Any]:
        """Return (updates to add to the weights, next state); see `init` for the structure.

        `select(next state, state)` is the state to keep, and `hvp` that of `Learner.update`.
        """
        groups = self._divide(params, stacks)
        states = _states_by_name(state, groups)
        trees = [flatten_dict(tree) for tree in (grads, params, raw_grads)]
        updates: dict[Path, Any] = {}
        for name, group in groups.items():

            def update_one(
                grads: Any, state: Any, params: Any, raw: Any, group: _Group = group
            ) -> tuple[Any, Any]:
                transformation = group.optimizer.transformation
                extra: dict[str, Any] = {"raw_grads": raw, "loss": loss, "hvp": hvp}
                return optimizer_updates.update(transformation, grads, state, params, **extra)

            grads_, params_, raw_ = (group.select(tree) for tree in trees)
            arguments = (grads_, states[name], params_, raw_)
            update_all = map_stack(update_one, group.sizes)
            if any(map(optimizer_updates.is_on_host, jax.tree.leaves(states[name]))):
                from layerkit_runner.optim import host_state

                declared = group.optimizer.per_layer
                is_by_layer = group.sizes or host_state.has_state_by_entry(
                    states[name],
                    params_,
                    per_layer=self._per_layer if declared is None else declared,
                )
                is_allowed = is_by_layer and not optimizer_updates.is_schedule_free(states[name])
                kind = getattr(group.optimizer.transformation.update, "__qualname__", "")
                expected = f"one that updates entries, such as adamw, with {host_state.FIELD}=True"
                owner, kind = group.optimizer.owner, kind.partition(".")[0]
                require(is_allowed, owner, "optimizer", kind, expected)
                loop = host_state.update_stack if group.sizes else host_state.update_by_layer
                changes, states[name] = loop(update_all, arguments, select=select)
            else:
                changes, new_state = update_all(*arguments)
                states[name] = select(new_state, states[name])
            updates.update(flatten_dict(changes))
        return unflatten_dict(updates), _bare(states)

    def evaluated(self, params: Any, state: Any, stacks: Stacks) -> Any:
        """Return `params` with the averages of schedule-free optimizers in their places."""
        groups = self._divide(params, stacks)
        flat = flatten_dict(params)
        for name, group_state in _states_by_name(state, groups).items():
            if optimizer_updates.is_schedule_free(group_state):
                group = groups[name]
                find = map_stack(optimizer_updates.evaluated, group.sizes)
                flat.update(flatten_dict(find(group_state, group.select(flat))))
        return unflatten_dict(flat)

    def steps_taken(self, state: Any, params: Any, stacks: Stacks) -> dict[str, jax.Array]:
        """Return the known step counts of the optimizers' schedules, by name of the optimizer."""
        groups = self._divide(params, stacks)
        counts = {}
        for name, group_state in _states_by_name(state, groups).items():
            count = optimizer_updates.steps_taken(group_state)
            if count is not None:
                counts[groups[name].optimizer.name] = count
        return counts

    def _divide(self, params: Any, stacks: Stacks) -> dict[str, _Group]:
        flat = flatten_dict(params)
        groups: dict[str, _Group] = {}
        for optimizer, paths in zip(self._optimizers, self.assign(flat), strict=True):
            stacked = {path: stacks[path] for path in paths if path in stacks}
            if not stacked or not self._works_by_layer(optimizer):
                stacked = {}
            for sizes in sorted({stacked.get(path, ()) for path in paths}):
                members = tuple(path for path in paths if stacked.get(path, ()) == sizes)
                name = "-".join([optimizer.name, *(["layers", *map(str, sizes)] if sizes else [])])
                groups[name] = _Group(optimizer, members, sizes)
        return groups

    def _works_by_layer(self, optimizer: NamedOptimizer) -> bool:
        per_layer = optimizer.per_layer if self._per_layer is None else self._per_layer
        if per_layer is None:
            expected = (
                "True if an update depends on a whole tensor, as with optax.adafactor, or False, as"
                " with optax.adamw; the optimizer declares neither, and some weights are stacks"
            )
            owner = optimizer.owner
            raise ConfigError(owner=owner, field="Learner.per_layer", value=None, expected=expected)
        return per_layer

    def assign(self, flat: Mapping[Path, Any]) -> list[list[Path]]:
        """Return the paths that each optimizer updates, of weights or shapes by path."""
        main, *others = self._optimizers
        owners: dict[str, NamedOptimizer] = {}
        for optimizer in others:
            weights = optimizer.weights or ()
            for selection in [weights] if callable(weights) else weights:
                for name in _selected(selection, flat, owner=optimizer.owner):
                    other = owners.setdefault(name, optimizer)
                    expected = f"no match with {name}, which {other.owner} updates"
                    value = getattr(selection, "__name__", selection)
                    require(other is optimizer, optimizer.owner, "weights", value, expected)
        assigned = [
            [path for path in flat if owners.get("/".join(path), main) is one]
            for one in self._optimizers
        ]
        if not assigned[0]:
            hint = f"{', '.join(one.owner for one in others)} updates all weights."
            raise ConfigError("no weight is left to train", owner=main.owner, hint=hint)
        return assigned


def _selected(selection: Any, flat: Mapping[Path, Any], *, owner: str) -> list[str]:
    """Return the names of the weights that a function or a pattern selects."""
    names = ["/".join(path) for path in flat]
    if callable(selection):
        is_selected = flatten_dict(selection(unflatten_dict(dict(flat))), sep="/")
        return [name for name in names if is_selected[name]]
    return matching_paths(selection, names, owner=owner, field="weights", kind="trained weight")


def _bare(states: dict[str, Any]) -> Any:
    return next(iter(states.values())) if len(states) == 1 else states


def _states_by_name(state: Any, groups: Mapping[str, _Group]) -> dict[str, Any]:
    return dict.fromkeys(groups, state) if len(groups) == 1 else dict(state)
