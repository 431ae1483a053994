"""Finds the fields of a layer that change nothing.

A field that nobody reads is a promise that is silently broken: somebody sets it, and trains without
it. `dead_fields` gives every field another value and looks for a difference in what the layer is:
the weights it creates (shapes, logical axes, first values) and the programs that it traces, in
training and in evaluation. Computations whose result is not used do not count.

    def test_every_field_of_my_layer_matters():
        config = MyLayer.HParams.config(dims=4, epsilon=1e-6)
        assert not dead_fields(Example(config, lambda layer: layer(jnp.ones((2, layer.dims)))))
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.interpreters import partial_eval

from layerkit.base_layer import AUX_LOSS, CACHE, NON_TRAINABLE, RANDOM, SUMMARIES, BaseLayer
from layerkit.config import Config, build, is_config, target_of
from layerkit.sharding import BoundSharding
from layerkit.weights import WeightInit, logical_axes, unbox

# What every layer has is tested once, with the base layer.
_OF_EVERY_LAYER = frozenset(field.name for field in dataclasses.fields(BaseLayer))
_MUTABLE = (NON_TRAINABLE, AUX_LOSS, SUMMARIES, CACHE)
# Functions print with the address at which they happen to lie.
_ADDRESS = re.compile(r"0x[0-9a-f]+")


@dataclasses.dataclass(frozen=True)
class Change:
    """Another value for a field, and what else must be set for the field to matter.

    Attributes:
      value: The other value.
      given: Field → value, set before and after the change alike.
      refusal: Words of the ValueError with which the layer refuses the value, where that is all
        that can be seen of it here, such as a kernel that needs other hardware.
    """

    value: Any
    given: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    refusal: str | None = None


@dataclasses.dataclass(frozen=True)
class Example:
    """A layer with which `dead_fields` can be asked.

    Attributes:
      config: Of sizes that allow each change.
      run: `layer -> outputs`, arrays of any shapes; calls the layer in every way that fields are
        about: its `fprop` and, where it has them, its cached steps.
      changes: Field → another value, or a `Change`.
    """

    config: Config
    run: Callable[[Any], Any]
    changes: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def layer_class(self) -> Any:
        """The class of the layer."""
        return target_of(self.config)


def dead_fields(example: Example, *, sharding: BoundSharding | None = None) -> list[str]:
    """The fields of a layer's class that can be changed without any effect.

    A field needs no entry in `changes` where its present value tells one that is valid: a bool is
    flipped, a number doubled (or raised from 0), axes are unnamed, an initialiser becomes a
    constant, and a template makes its weights in bfloat16.

    Args:
      example: The layer.
      sharding: Mesh and rules under which `activation_axes` have an effect.

    Returns:
      Names of dead fields, those of the base layer left out.

    Raises:
      ValueError: a field without a change, where none can be made up, or a change of no field.
    """
    config, changes = example.config, dict(example.changes)
    known: dict[str, Any] = {}

    def aspects_before(given: Mapping[str, Any]) -> Any:
        key = repr(sorted((name, repr(value)) for name, value in given.items()))
        if key not in known:
            known[key] = _aspects(_with(config, given), example.run, sharding)
        # Traced as far as somebody asks, and once.
        known[key], again = itertools.tee(known[key])
        return again

    dead = []
    for field in dataclasses.fields(example.layer_class):
        name = field.name
        if name in _OF_EVERY_LAYER:
            continue
        change = changes.pop(name, None)
        if not isinstance(change, Change):
            change = Change(_another(config, name) if change is None else change)
        values = {**change.given, name: change.value}
        if change.refusal is not None:
            refusal = _refusal(_with(config, values), example.run, sharding)
            is_dead = change.refusal not in refusal
        else:
            after = _aspects(_with(config, values), example.run, sharding)
            pairs = zip(aspects_before(change.given), after, strict=True)
            is_dead = all(before == now for before, now in pairs)  # up to the first difference
        if is_dead:
            dead.append(name)
    if changes:
        raise ValueError(f"{example.layer_class.__name__} has no fields {sorted(changes)}")
    return dead


def _with(config: Config, values: Mapping[str, Any]) -> Config:
    changed = config.clone()
    changed.set(**values)
    return changed


def _another(config: Config, name: str) -> Any:
    """Some other valid value of a field, where its present one tells."""
    value = getattr(config, name)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return 2 * value or 1
    if isinstance(value, float):
        return 2 * value or 0.25
    if name.endswith("_init"):
        return WeightInit.Constant(0.125)
    if is_config(value):
        return value.clone(dtype="bfloat16")
    if name.endswith("_axes") and isinstance(value, tuple):
        return (None,) * len(value)
    raise ValueError(
        f"{target_of(config).__name__}.{name}={value!r}: say in `changes` what else it may be"
    )


def _refusal(config: Config, run: Callable[[Any], Any], sharding: BoundSharding | None) -> str:
    try:
        list(_aspects(config, run, sharding))
    except ValueError as error:
        return str(error)
    return ""


def _aspects(
    config: Config, run: Callable[[Any], Any], sharding: BoundSharding | None
) -> Iterator[Any]:
    """All that can be seen of a layer, bit by bit, comparable by ==; nothing is computed for it."""
    layer = build(config)
    key = jax.random.key(0)
    program, boxed = _program(layer.init_boxed, key)
    yield str(logical_axes(boxed)), program
    for train in (False, True):
        mode = layer.clone(train=train, sharding=sharding)

        def apply(variables: Any, key: jax.Array, mode: Any = mode) -> Any:
            rngs = {RANDOM: key}
            return mode.apply(variables, method=run, rngs=rngs, mutable=list(_MUTABLE))

        yield _program(apply, unbox(boxed), key)[0]


def _program(function: Callable[..., Any], *arguments: Any) -> tuple[Any, Any]:
    """The traced program without what does not reach its results, and the shapes of its results."""
    closed, results = jax.make_jaxpr(function, return_shape=True)(*arguments)
    needed, _ = partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars))
    constants = [(str(c.dtype), np.shape(c), np.asarray(c).tobytes()) for c in closed.consts]
    return (_ADDRESS.sub("", str(needed)), str(jax.tree.map(str, results)), constants), results
