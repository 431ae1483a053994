"""Which optimizer updates which weights, and which weights it sees as several tensors.

The trained weights are divided into groups: by the optimizer whose patterns they match and, where
that optimizer goes by tensors, by how they are stacked; a group of stacked weights is updated layer
by layer, under `jax.vmap`. Each group's optimizer sees that group alone and has a state of its own.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax.traverse_util import flatten_dict, unflatten_dict

from layerkit.near_names import near_names
from layerkit_runner.errors import UsageError, first_names
from layerkit_runner.optim import optimizer_calls
from layerkit_runner.optim.optimizer_reach import Reach, reach_of
from layerkit_runner.optim.stacked_weights import Path, Stacks, over_stack

MAIN = "main"


@dataclasses.dataclass(frozen=True)
class NamedOptimizer:
    """An optimizer of a learner.

    Attributes:
      name: In scalars and in the state.
      field: What configures it, for messages.
      transformation: The optimizer.
      learning_rate: A number or schedule, for reports; None where it has its own.
      weights: Patterns of the weights that it updates; None for all that are left.
    """

    name: str
    field: str
    transformation: optax.GradientTransformation
    learning_rate: Any = None
    weights: Sequence[str] | None = None

    def rate(self, step: jax.Array) -> jax.Array | None:
        """The float32 rate at `step`, where it is known."""
        if self.learning_rate is None:
            return None
        rate = self.learning_rate(step) if callable(self.learning_rate) else self.learning_rate
        return jnp.asarray(rate, jnp.float32)


@dataclasses.dataclass(frozen=True)
class _Group:
    owner: str
    transformation: optax.GradientTransformation
    paths: tuple[Path, ...]
    sizes: tuple[int, ...]

    def take(self, flat: Mapping[Path, Any]) -> Any:
        return unflatten_dict({path: flat[path] for path in self.paths})


class OptimizerGroups:
    """All optimizers of a learner as one.

    Args:
      optimizers: The first is the main one.
      per_layer: Whether layers of a stack are tensors of their own; None asks the optimizer.
    """

    def __init__(self, optimizers: Sequence[NamedOptimizer], *, per_layer: bool | None):
        self._optimizers = tuple(optimizers)
        self._per_layer = per_layer
        self._groups: tuple[Any, dict[str, _Group]] | None = None

    def init(self, params: Any, stacks: Stacks) -> Any:
        """The first state: of a single group that of its optimizer, else one by group name.

        Args:
          params: The trained weights, nested dicts `[...]`.
          stacks: Which of them are stacked.

        Raises:
          UsageError: patterns that overlap, or match nothing or everything; an optimizer that
            cannot be used, or of which it is not clear what the layers of a stack are to it.
        """

        flat = flatten_dict(params)
        return _bare(
            {
                name: over_stack(group.transformation.init, group.sizes)(group.take(flat))
                for name, group in self._divide(params, stacks).items()
            }
        )

    def update(
        self,
        grads: Any,
        state: Any,
        params: Any,
        stacks: Stacks,
        *,
        raw_grads: Any,
        loss: jax.Array | None,
    ) -> tuple[Any, Any]:
        """Return (what to add to the weights, next state), shaped as in `init`.

        Args:
          grads: Gradients, clipped where the learner clips.
          state: State of the optimizers.
          params: The trained weights.
          stacks: Which of them are stacked.
          raw_grads: Gradients before clipping.
          loss: The global loss; None if it is unknown.
        """
        groups = self._divide(params, stacks)
        states = _by_name(state, groups)
        trees = [flatten_dict(tree) for tree in (grads, params, raw_grads)]
        updates: dict[Path, Any] = {}
        for name, group in groups.items():

            def update_one(
                grads: Any, state: Any, params: Any, raw: Any, group: _Group = group
            ) -> tuple[Any, Any]:
                return optimizer_calls.update(
                    group.transformation, grads, state, params, raw_grads=raw, loss=loss
                )

            own_grads, own_params, own_raw = (group.take(tree) for tree in trees)
            own, states[name] = over_stack(update_one, group.sizes)(
                own_grads, states[name], own_params, own_raw
            )
            updates.update(flatten_dict(own))
        return unflatten_dict(updates), _bare(states)

    def evaluated(self, params: Any, state: Any, stacks: Stacks) -> Any:
        """Return the weights to evaluate with; they differ from `params` for schedule-free ones.

        Args:
          params: The trained weights.
          state: State of the optimizers.
          stacks: Which weights are stacked.
        """
        groups = self._divide(params, stacks)
        flat = flatten_dict(params)
        for name, own in _by_name(state, groups).items():
            if optimizer_calls.is_schedule_free(own):
                group = groups[name]
                find = over_stack(optimizer_calls.evaluated, group.sizes)
                flat.update(flatten_dict(find(own, group.take(flat))))
        return unflatten_dict(flat)

    def steps_taken(self, state: Any, params: Any, stacks: Stacks) -> dict[str, jax.Array]:
        """Return the count by which each optimizer's schedule goes, where it is known."""
        groups = self._divide(params, stacks)
        taken = {}
        for name, own in _by_name(state, groups).items():
            count = optimizer_calls.steps_taken(own)
            if count is not None:
                taken[groups[name].owner] = count
        return taken

    def _divide(self, params: Any, stacks: Stacks) -> dict[str, _Group]:
        flat = flatten_dict(params)
        key = (tuple(flat), tuple(stacks.get(path, ()) for path in flat))
        if self._groups is None or self._groups[0] != key:
            self._groups = (key, self._make_groups(flat, stacks))
        return self._groups[1]

    def _make_groups(self, flat: dict[Path, Any], stacks: Stacks) -> dict[str, _Group]:
        groups: dict[str, _Group] = {}
        for optimizer, paths in zip(self._optimizers, self._assign(list(flat)), strict=True):
            part = unflatten_dict({path: flat[path] for path in paths})
            optimizer_calls.check_usable(optimizer.transformation, part, field=optimizer.field)
            stacked = {path: stacks[path] for path in paths if path in stacks}
            if not stacked or not self._goes_by_layer(optimizer, part, stacked):
                stacked = {}
            for sizes in sorted({stacked.get(path, ()) for path in paths}):
                own = tuple(path for path in paths if stacked.get(path, ()) == sizes)
                name = "-".join([optimizer.name, *(["layers", *map(str, sizes)] if sizes else [])])
                groups[name] = _Group(optimizer.name, optimizer.transformation, own, sizes)
        return groups

    def _goes_by_layer(self, optimizer: NamedOptimizer, params: Any, stacked: Stacks) -> bool:
        if self._per_layer is not None:
            return self._per_layer
        reach = reach_of(optimizer.transformation, params)
        if reach is Reach.TREE:
            raise UsageError(
                f"{optimizer.field} looks across weights, as optax.clip_by_global_norm does, and"
                f" {'/'.join(next(iter(stacked)))} is a stack of layers. Set"
                " Learner.per_layer=False"
                " if nothing else in it goes by whole tensors (True would let it see one layer at a"
                " time), or clip by Learner.clip_global_norm instead"
            )
        return reach is Reach.TENSOR

    def _assign(self, paths: list[Path]) -> list[list[Path]]:
        """The weights of each optimizer, in its order."""
        names = {"/".join(path): path for path in paths}
        taken: dict[str, NamedOptimizer] = {}
        for optimizer in self._optimizers[1:]:
            for pattern in optimizer.weights or ():
                found = [name for name in names if re.fullmatch(pattern, name)]
                if not found:
                    raise UsageError(
                        f"{optimizer.field}: {pattern!r} matches no trained weight"
                        f"{near_names(pattern, list(names))} A pattern has to match the whole"
                        f" path. Weights: {first_names(names)}."
                    )
                for name in found:
                    other = taken.setdefault(name, optimizer)
                    if other is not optimizer:
                        raise UsageError(
                            f"{optimizer.field}: {pattern!r} matches {name}, which"
                            f" {other.field} updates already; patterns must not overlap"
                        )
        left = [path for name, path in names.items() if name not in taken]
        if not left:
            raise UsageError(
                f"{self._optimizers[0].field}: no weight is left to it, since the auxiliary"
                " optimizers update them all"
            )
        return [
            left,
            *(
                [names[name] for name in names if taken.get(name) is optimizer]
                for optimizer in self._optimizers[1:]
            ),
        ]


def _bare(states: dict[str, Any]) -> Any:
    """States by group; that of a single group is the state of its optimizer, as Optax has it."""
    return next(iter(states.values())) if len(states) == 1 else states


def _by_name(state: Any, groups: Mapping[str, _Group]) -> dict[str, Any]:
    """The reverse of `_bare`."""
    return dict.fromkeys(groups, state) if len(groups) == 1 else dict(state)
