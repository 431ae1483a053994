"""Tests that find the fields of a layer that have no effect.

`dead_fields` gives each field another value and compares the layer before and after: the weights
that it creates (shapes, logical axes, first values) and the programs that it traces, in training
and in evaluation. Computations without a used result do not count. `ignored_fields` does the same
while other fields are switched on or off; a field without effect must raise an error then.

    def test_every_field_of_my_layer_matters():
        config = MyLayer.HParams.config(dims=4, epsilon=1e-6)
        assert not dead_fields(Example(config, lambda layer: layer(jnp.ones((2, layer.dims)))))
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.interpreters import partial_eval

from layerkit.base.base_layer import AUX_LOSS, CACHE, NON_TRAINABLE, RANDOM, SUMMARIES, BaseLayer
from layerkit.base.sharding import BoundSharding
from layerkit.base.weights import WeightInit, is_box, logical_axes, unbox
from layerkit.config import Config, build, is_config, target_of
from layerkit.config.hparams import conditions_of

# The tests of the base layer cover its fields.
_OF_EVERY_LAYER = frozenset(field.name for field in dataclasses.fields(BaseLayer))
_MUTABLE = (NON_TRAINABLE, AUX_LOSS, SUMMARIES, CACHE)
# Addresses of functions in their text, which differ between runs.
_ADDRESS = re.compile(r"0x[0-9a-f]+")


@dataclasses.dataclass(frozen=True)
class Change:
    """Another value for a field, with the other fields that must be set for an effect.

    Attributes:
      value: The other value.
      others: Values of other fields, set before and after the change.
      refusal: Part of the message of the ValueError that the value raises, if it cannot be tested
        otherwise, such as a kernel that needs other hardware.
    """

    value: Any
    others: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    refusal: str | None = None


@dataclasses.dataclass(frozen=True)
class Example:
    """A layer whose fields are tested.

    Attributes:
      config: Config with sizes that allow each change.
      run: Function `layer -> outputs`, arrays of any shapes, which calls every method that fields
        affect: `fprop` and, if the layer has them, cached steps.
      changes: Another value, or a `Change`, by field.
    """

    config: Config
    run: Callable[[Any], Any]
    changes: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def layer_class(self) -> Any:
        """The class of the layer."""
        return target_of(self.config)


def dead_fields(example: Example, *, sharding: BoundSharding | None = None) -> list[str]:
    """Return the fields of a layer's class that can be changed without effect.

    A field needs no entry in `changes` if another valid value follows from its present one: a bool
    is flipped, an integer is doubled, a float is halved (or raised from 0), axes lose their names,
    an initializer is constant, and the weights of a template become bfloat16.

    Args:
      example: The layer.
      sharding: Mesh and rules under which `activation_axes` have an effect.

    Returns:
      Names of the dead fields, without those of the base layer.

    Raises:
      ValueError: A field has no change and none can be generated, or a change has no field.
    """
    probe = _Probe(example, sharding)
    return [name for name, change in _all_changes(example).items() if probe.is_dead(name, change)]


def ignored_fields(example: Example, *, sharding: BoundSharding | None = None) -> list[str]:
    """Return the fields that another field switches off without an error.

    A field that has no effect any more has to raise when it is changed; see
    `BaseLayer.used_only_if`. Switches are the fields whose change turns a value on or off: a bool,
    None, or 0.

    Args:
      example: The layer.
      sharding: Mesh and rules under which `activation_axes` have an effect.

    Returns:
      Entries such as "bias_tpl while use_bias=False", sorted.
    """
    probe, changes = _Probe(example, sharding), _all_changes(example)
    ignored: set[str] = set()
    for name, change in changes.items():
        if change.refusal is not None:
            continue
        if change.others and probe.is_ignored(name, change.value, {}):
            states = [f"{field}={getattr(example.config, field)!r}" for field in change.others]
            ignored.add(f"{name} while {', '.join(states)}")
        for switch, other in changes.items():
            before = getattr(*_owner(example.config, switch))
            turns = bool(before) != bool(other.value)
            if switch == name or switch in change.others or other.refusal is not None or not turns:
                continue
            others = {**change.others, **other.others, switch: other.value}
            if name not in others and probe.is_ignored(name, change.value, others):
                state = " is set" if is_config(other.value) else f"={other.value!r}"
                ignored.add(f"{name} while {switch}{state}")
    return sorted(ignored)


class _Probe:
    """A comparison of the layer of an example before and after a change."""

    def __init__(self, example: Example, sharding: BoundSharding | None):
        self._example, self._sharding = example, sharding
        self._before: dict[str, Any] = {}

    def is_dead(self, name: str, change: Change) -> bool:
        """Return True if a change has no effect, or does not raise the error that it states."""
        values = {**change.others, name: change.value}
        if change.refusal is not None:
            return change.refusal not in self._refusal(values)
        try:
            return self._is_equal(change.others, values)
        except ValueError as error:
            owner = self._example.layer_class.__name__
            error.add_note(
                f"{owner}.{name} was set to {change.value!r} to see its effect. If that value is"
                " not valid, give another in `changes`."
            )
            raise

    def is_ignored(self, name: str, value: Any, others: Mapping[str, Any]) -> bool:
        """Return True if a change on top of `others` neither has an effect nor raises an error."""
        try:
            return self._is_equal(others, {**others, name: value})
        except ValueError:
            return False

    def _is_equal(self, others: Mapping[str, Any], values: Mapping[str, Any]) -> bool:
        key = repr(sorted((name, repr(value)) for name, value in others.items()))
        if key not in self._before:
            self._before[key] = self._aspects(others)
        # Each aspect is traced once, when it is first compared.
        self._before[key], before = itertools.tee(self._before[key])
        pairs = zip(before, self._aspects(values), strict=True)
        return all(old == new for old, new in pairs)  # up to the first difference

    def _refusal(self, values: Mapping[str, Any]) -> str:
        """Return the message of the error that tracing the layer raises, or an empty text."""
        try:
            list(self._aspects(values))
        except ValueError as error:
            return str(error)
        return ""

    def _aspects(self, values: Mapping[str, Any]) -> Iterator[Any]:
        return _aspects(
            _replace_fields(self._example.config, values), self._example.run, self._sharding
        )


def _all_changes(example: Example) -> dict[str, Change]:
    """Return a change of every field of a layer's class, those of the base layer left out.

    Fields of templates are among them where the class states a condition for them.

    Raises:
      ValueError: A field has no change and none can be generated, or a change has no field.
    """
    changes, result = dict(example.changes), {}
    for field in dataclasses.fields(example.layer_class):
        if field.name in _OF_EVERY_LAYER:
            continue
        change = changes.pop(field.name, None)
        if not isinstance(change, Change):
            value = _another_value(example.config, field.name) if change is None else change
            change = Change(value)
        result[field.name] = change
    for path in conditions_of(example.layer_class):
        if "." in path:
            result[path] = Change(_another_value(*_owner(example.config, path)))
    if changes:
        raise ValueError(f"{example.layer_class.__name__} has no fields {sorted(changes)}")
    return result


def _replace_fields(config: Config, values: Mapping[str, Any]) -> Config:
    changed = config.clone()
    for path, value in values.items():
        owner, name = _owner(changed, path)
        owner.set(**{name: value})
    return changed


def _owner(config: Config, path: str) -> tuple[Config, str]:
    """Return the config that holds a field, such as that of a template, and the field's name."""
    *parents, name = path.split(".")
    return functools.reduce(getattr, parents, config), name


def _another_value(config: Config, name: str) -> Any:
    """Return another valid value of a field, if it follows from the present one."""
    value = getattr(config, name)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return 2 * value or 1
    if isinstance(value, float):
        return value / 2 or 0.25  # half of a rate is a rate
    if name.endswith("_init"):
        return WeightInit.Constant(0.125)
    if is_config(value):
        return value.clone(dtype="bfloat16")
    if name.endswith("_axes") and isinstance(value, tuple):
        return (None,) * len(value)
    raise ValueError(
        f"{target_of(config).__name__}.{name}={value!r}: say in `changes` what else it may be"
    )


def _aspects(
    config: Config, run: Callable[[Any], Any], sharding: BoundSharding | None
) -> Iterator[Any]:
    """Yield the weights and the programs of a layer, comparable by ==, without computing them."""
    layer = build(config)
    key = jax.random.key(0)
    program, boxed = _program(layer.init_boxed, key)
    decays = jax.tree.map(lambda leaf: is_box(leaf) and leaf.decays, boxed, is_leaf=is_box)
    yield str((logical_axes(boxed), decays)), program
    for train in (False, True):
        mode = layer.clone(train=train, sharding=sharding)

        def apply(variables: Any, key: jax.Array, mode: Any = mode) -> Any:
            rngs = {RANDOM: key}
            return mode.apply(variables, method=run, rngs=rngs, mutable=list(_MUTABLE))

        yield _program(apply, unbox(boxed), key)[0]


def _program(function: Callable[..., Any], *arguments: Any) -> tuple[Any, Any]:
    """Return the traced program without unused computations, and the shapes of its results."""
    closed, results = jax.make_jaxpr(function, return_shape=True)(*arguments)
    needed, _ = partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars))
    constants = [(str(c.dtype), np.shape(c), np.asarray(c).tobytes()) for c in closed.consts]
    return (_ADDRESS.sub("", str(needed)), str(jax.tree.map(str, results)), constants), results
