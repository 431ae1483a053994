"""Matches the values of a run with stored values, by rules or by name.

Only names, shapes and dtypes are compared, so errors come before a model is compiled or a file is
written. All differences are reported at once.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from layerkit.base.base_layer import PARAMS
from layerkit.base.base_model import BaseModel
from layerkit.errors import near_names
from layerkit_runner.checkpointing.stored_state import (
    OPT_STATE,
    LeafPath,
    LeafSpec,
    join,
    named_leaves,
    spec_of,
)
from layerkit_runner.errors import UsageError
from layerkit_runner.init_from.settings import ADAPTER_WEIGHTS, InitFrom, Origin, Rule
from layerkit_runner.init_from.sources import Opened
from layerkit_runner.step.train_state import TrainState

if TYPE_CHECKING:
    from layerkit_runner.init_from.sources import StoredValues

EMA = "ema"
# Fields of the averages of other fields.
_AVERAGES_OF = {PARAMS: EMA, "non_trainable": "ema_statistics"}
# Fields of a state that a model reads. Their values are named by layer path alone.
MODEL_FIELDS = (PARAMS, "non_trainable", "overwrite_with_gradient")

_MAX_SHOWN = 20
# (part of the names of this run, part of those of the source, the rule that relates them)
_UNSTACK = ("/layers_0/", "/repeat/sub/", r'(r"(.*)/layers_(\d+)/(.*)", r"\1/repeat/sub/\3[\2]")')
_STACK = ("/repeat/sub/", "/layers_0/", r'(r"(.*)/repeat/sub/(.*)", r"\1/layers_{layer}/\2")')


@dataclasses.dataclass(frozen=True)
class InitialValue:
    """The origin of one initial value: stored values, and the shape and sharding in this run."""

    stored: StoredValues
    origin: Origin
    paths: tuple[LeafPath, ...]
    target: jax.ShapeDtypeStruct

    @property
    def stored_dtype(self) -> np.dtype:
        """Dtype of the value in the source."""
        return self.stored.leaves[self.paths[0]].dtype

    def __str__(self) -> str:
        """Return the origin as `DIR:STEP:params/lm/w[3]`."""
        collection = self.paths[0][0]
        return f"{self.stored.label}:{collection}/{self.origin.text}"


@dataclasses.dataclass(frozen=True)
class Matched:
    """The origins of all initial values by path in the state, such as `("params", "lm", "w")`.

    `drawn` weights are initialized randomly; `copied` has the originals of copies, both below
    `params`. The run continues to count from `step`, that of the source `step_from`.
    """

    values: Mapping[LeafPath, InitialValue]
    drawn: tuple[LeafPath, ...]
    copied: Mapping[LeafPath, LeafPath] = dataclasses.field(default_factory=dict)
    step: int = 0
    step_from: str | None = None


def match(
    settings: InitFrom, opened: Sequence[Opened], state: TrainState, *, model: BaseModel
) -> Matched:
    """Find the origin of every initial value; an error lists all differences."""
    return _Matching(settings, opened, state, model).run()


class _Matching:
    """A pass over the values of a state that collects all faults."""

    def __init__(
        self, settings: InitFrom, opened: Sequence[Opened], state: TrainState, model: BaseModel
    ):
        self._settings, self._opened, self._model = settings, opened, model
        leaves = named_leaves(state)
        self._weights = {p: leaf for p, leaf in leaves.items() if p[0] in MODEL_FIELDS}
        self._opt_state = {p: leaf for p, leaf in leaves.items() if p[0] == OPT_STATE}
        self._values: dict[LeafPath, InitialValue] = {}
        self._drawn: list[LeafPath] = []
        self._copied: dict[LeafPath, LeafPath] = {}
        self._faults: list[str] = []
        self._missing: list[str] = []
        # Weights that both sides have by one name, although with another shape, or drawn.
        self._accounted: set[LeafPath] = set()

    def run(self) -> Matched:
        """Match all values and return their origins."""
        for source in self._opened:
            self._compare_fields(source)
        used: set[Rule] = set()
        for path, leaf in self._weights.items():
            self._place_weight(path, leaf, used)
        for path, leaf in self._opt_state.items():
            for source in self._opened:
                if self._apply_rules(source, source.settings.state_rules, path, leaf, used):
                    break
        self._add_unused_patterns(used)
        for source in self._opened:
            self._add_surplus(source)
        if self._faults:
            raise UsageError(self._message(), owner=self._settings.label)
        matched = Matched(self._values, tuple(self._drawn), self._copied)
        for source in self._opened:
            if source.settings.load_step:
                stored = source.stored
                return dataclasses.replace(matched, step=stored.step or 0, step_from=stored.label)
        return matched

    def _compare_fields(self, source: Opened) -> None:
        """Raise an error if a field asks for values that the kind of source does not hold."""
        settings, stored = source.settings, source.stored
        asked = {"use_ema": settings.use_ema}
        if any(path[0] == EMA for path in stored.leaves):
            asked = {}
        if stored.step is None:
            asked |= {"step": settings.step is not None, "load_step": settings.load_step}
            asked |= {"opt_state_rules": bool(settings.opt_state_rules)}
        for name in [name for name, is_asked in asked.items() if is_asked]:
            expected = f"no value, since {stored.label} does not hold it"
            value, owner = getattr(settings, name), self._settings.label
            raise UsageError(owner=owner, field=name, value=value, expected=expected)

    def _place_weight(self, path: LeafPath, leaf: Any, used: set[Rule]) -> None:
        name = join(path[1:])
        is_frozen = any(re.fullmatch(one, name) for one in self._model.frozen_weights)
        original = self._model.original_of(path[1:]) if path[0] == PARAMS else None
        for pattern in self._settings.draw:
            if not re.fullmatch(pattern, name):
                continue
            if is_frozen:
                self._report_frozen_draw(name, pattern, original)
            else:
                self._draw(path)
            return
        for source in self._opened:
            rules = source.settings.weight_rules
            if rules is not None:
                if self._apply_rules(source, rules, path, leaf, used):
                    return
                continue
            stored = _find_in_source(source, path[0], name)
            if stored is not None:
                self._add(source, Origin(name, (name,)), (stored,), path, leaf)
                return
        if original is not None:
            self._copied[path[1:]] = original
            return
        is_adapter = any(re.fullmatch(pattern, name) for pattern in ADAPTER_WEIGHTS)
        if (self._settings.missing == "draw" and not is_frozen) or is_adapter:
            self._draw(path)
            return
        sources = " or ".join(one.stored.label for one in self._opened)
        there = (one for source in self._opened for one in _names_in(source, path[0]))
        self._faults.append(f"{name} {spec_of(leaf)}: not in {sources}{self._near(name, there)}")
        self._missing.append(name)

    def _report_frozen_draw(self, name: str, pattern: str, original: LeafPath | None) -> None:
        """Add the fault of a pattern that draws frozen weights, once for each pattern."""
        start = f"draw={pattern!r} matches frozen weights"
        if any(fault.startswith(start) for fault in self._faults):
            return
        advice = "Take them from a source."
        if original is not None:
            advice = f"Leave them out of the pattern: {name} starts as a copy of {join(original)}."
        self._faults.append(f"{start}, such as {name}. Expected weights that are trained. {advice}")

    def _draw(self, path: LeafPath) -> None:
        self._drawn.append(path)
        self._accounted.add(path)

    def _apply_rules(
        self, source: Opened, rules: Iterable[Rule], path: LeafPath, leaf: Any, used: set[Rule]
    ) -> bool:
        """Apply the first rule that matches; return whether there is one, also after a fault."""
        name = join(path[1:])
        for rule in rules:
            origin = rule.origin(name, tuple(leaf.shape))
            if origin is None:
                continue
            used.add(rule)
            places = [(one, _find_in_source(source, path[0], one)) for one in origin.names]
            absent = [one for one, place in places if place is None]
            if absent:
                near = self._near(absent[0], _names_in(source, path[0]))
                self._faults.append(
                    f"{name}: {rule}: {absent[0]} is not in {source.stored.label}{near}"
                )
            else:
                present = tuple(place for _, place in places if place is not None)
                self._add(source, origin, present, path, leaf)
            return True
        return False

    def _add(
        self,
        source: Opened,
        origin: Origin,
        places: tuple[LeafPath, ...],
        path: LeafPath,
        leaf: Any,
    ) -> None:
        name, specs = join(path[1:]), [source.stored.leaves[place] for place in places]
        self._accounted.add(path)
        by_name = dict(zip(origin.names, [spec.shape for spec in specs], strict=True))
        try:
            shape = origin.shape(by_name)
        except ValueError as error:
            self._faults.append(f"{name}: {error}")
            return
        stored_dtype = specs[0].dtype
        fits = stored_dtype == leaf.dtype or (_is_float(stored_dtype) and _is_float(leaf.dtype))
        if shape != tuple(leaf.shape) or not fits:
            there = LeafSpec(shape, stored_dtype)
            called = "" if origin.text == name else f" {origin.text}"
            self._faults.append(
                f"{name}: {spec_of(leaf)} here, but{called} {there} in {source.stored.label}"
            )
            return
        self._values[path] = InitialValue(source.stored, origin, places, leaf)

    def _add_unused_patterns(self, used: set[Rule]) -> None:
        """Add a fault for each pattern that matches nothing."""
        weights = [join(path[1:]) for path in self._weights]
        for pattern in self._settings.draw:
            if not any(re.fullmatch(pattern, name) for name in weights):
                self._faults.append(_no_match("draw", pattern, weights))
        for source in self._opened:
            values = [join(path[1:]) for path in self._opt_state]
            for rules, names in (
                (source.settings.weight_rules or (), weights),
                (source.settings.state_rules, values),
            ):
                for rule in rules:
                    if rule in used:
                        continue
                    if any(re.fullmatch(rule.pattern, name) for name in names):
                        self._faults.append(f"{rule} matches only values that others provide")
                    else:
                        self._faults.append(_no_match(rule.label, rule.pattern, names))
            there = [join(path[1:]) for path in source.stored.leaves if path[0] in MODEL_FIELDS]
            for pattern in source.settings.ignore:
                if not any(re.fullmatch(pattern, name) for name in there):
                    label = f"{source.settings.folder}: ignore"
                    self._faults.append(_no_match(label, pattern, there))

    def _add_surplus(self, source: Opened) -> None:
        """Add a fault for each weight that the model lacks, if the source has no rules."""
        if source.settings.weight_rules is not None:
            return
        taken = {
            place
            for value in self._values.values()
            if value.stored is source.stored
            for place in value.paths
        }
        for path, spec in source.stored.leaves.items():
            if path[0] not in MODEL_FIELDS or path in taken or path in self._accounted:
                continue
            name = join(path[1:])
            averaged = (EMA, *path[1:]) in taken
            if averaged or any(re.fullmatch(p, name) for p in source.settings.ignore):
                continue
            self._faults.append(f"{name} {spec}: in {source.stored.label}, not in the model")

    def _near(self, name: str, names: Iterable[str]) -> str:
        """Return the nearest names; empty for faults that are not shown, since a search is slow."""
        shown = len(self._faults) < _MAX_SHOWN
        return near_names(name, names) if shown else ""

    def _message(self) -> str:
        count = len(self._faults)
        lines = self._faults[:_MAX_SHOWN]
        if count > _MAX_SHOWN:
            lines.append(f"… and {count - _MAX_SHOWN} more")
        differences = "1 difference" if count == 1 else f"{count} differences"
        return (
            f"the source does not fit the model ({differences}):\n  "
            + "\n  ".join(lines)
            + self._stacking_advice()
            + "\nDraw weights with --init_draw=PATTERN or InitFrom.draw, rename them with"
            " Source.rules, or leave them out with Source.ignore. See docs/init_from.md."
        )

    def _stacking_advice(self) -> str:
        """Return the rule that is needed if only one of model and source stacks its layers."""
        there = [name for source in self._opened for name in _names_in(source, PARAMS)]
        for kind, other, rule in (_UNSTACK, _STACK):
            if any(kind in name for name in self._missing) and any(other in name for name in there):
                return f"\nOnly one of the two stacks its layers. Put this rule first: {rule}"
        return ""


def _find_in_source(source: Opened, field: str, name: str) -> LeafPath | None:
    """Return the path of a value in a source; under `use_ema` that of its average if it has one."""
    parts = tuple(name.split("/"))
    averages = _AVERAGES_OF.get(field) if source.settings.use_ema else None
    fields = (field,) if averages is None else (averages, field)
    return next((p for one in fields if (p := (one, *parts)) in source.stored.leaves), None)


def _names_in(source: Opened, field: str) -> list[str]:
    return [join(path[1:]) for path in source.stored.leaves if path[0] == field]


def _no_match(label: str, pattern: str, names: Sequence[str]) -> str:
    return f"{label}: {pattern!r} matches no name{near_names(pattern, names)}"


def _is_float(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.floating))
