"""Selection of weights by their paths and declarations: trained, noised and decayed ones.

A pattern is a regular expression that must match the whole path of a weight, such as
`lm/embedding/.*`. The stacked weights of repeated layers are one weight.

A weight declares whether it decays (`layerkit.WeightHParams.decays`). Optimizers call a mask with
plain arrays, so a task binds the declarations of its model around each call of the learner.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import math
import re
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import fiddle as fdl
import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.tree_util import DictKey, KeyPath, SequenceKey

from layerkit.base.weight_formats import scale_path
from layerkit.base.weights import WeightBox, is_box
from layerkit.config import Configurable
from layerkit.config.checks import check_integers, check_positive, check_regexes, require
from layerkit.errors import ConfigError, first_names

# Folded into the key of a step, so that the noise differs from the random numbers of all layers.
_NOISE_STREAM = 0x766E


def matching_paths(
    pattern: str, paths: Iterable[str], *, owner: str, field: str, kind: str = "weight"
) -> list[str]:
    """Return the paths that a pattern matches; raise `ConfigError` if it matches none."""
    paths = list(paths)
    matched = [path for path in paths if re.fullmatch(pattern, path)]
    if not matched:
        raise ConfigError(
            owner=owner,
            field=field,
            value=pattern,
            expected=f"a regular expression that matches the whole path of a {kind}",
            choices=paths,
        )
    return matched


@dataclasses.dataclass(frozen=True)
class TrainedWeights:
    """A selection of the weights to train, by default all of them.

    The other weights are frozen: they have no gradient, optimizer state or weight decay, and keep
    their bits. The trained part is a tree of its own with the same paths. Weights in integers are
    always frozen, and so are their scales unless a pattern selects them.

    Attributes:
      trainable: Patterns of the trained weights; None trains all but `frozen`.
      frozen: Patterns of the weights that are not trained.
      fixed: Patterns of the weights that the model fixes (`BaseModel.frozen_weights`), which are
        not trained even if a pattern of `trainable` matches them.
    """

    trainable: Sequence[str] | None = None
    frozen: Sequence[str] = ()
    fixed: Sequence[str] = ()

    def __post_init__(self) -> None:
        """Check the fields."""
        expected = f"(), because trainable={self.trainable} is set"
        require(
            self.trainable is None or not self.frozen, "Learner", "frozen", self.frozen, expected
        )
        check_regexes("Learner", trainable=self.trainable, frozen=self.frozen)

    def select(self, params: Any) -> Any:
        """Return the trained part of a tree of weights, nested dicts of arrays."""
        flat = flatten_dict(params)
        integers = integer_paths(flat)
        if self._is_all and not integers:
            return params
        trains_matched = self.trainable is not None
        field = "trainable" if trains_matched else "frozen"
        matched = {
            name
            for pattern in getattr(self, field)
            for name in matching_paths(pattern, map("/".join, flat), owner="Learner", field=field)
        }
        if not trains_matched:
            matched |= {"/".join(path) for path in [*integers, *map(scale_path, integers)]}
        trained = {
            path: leaf
            for path, leaf in flat.items()
            if ("/".join(path) in matched) == trains_matched and not self._is_fixed(path)
        }
        is_valid = trained and trained.keys().isdisjoint(integers)
        expected = "patterns that leave a weight to train, none of them stored in integers"
        require(is_valid, "Learner", field, tuple(getattr(self, field)), expected)
        return unflatten_dict(trained)

    def merge(self, params: Any, trained: Any) -> Any:
        """Return `params` with its trained part replaced by `trained`."""
        return unflatten_dict({**flatten_dict(params), **flatten_dict(trained)})

    def keep_frozen(self, old: Any, new: Any) -> Any:
        """Return the moving statistics `new`, with those of frozen paths as in `old`."""
        if self._is_all:
            return new
        patterns = self.frozen if self.trainable is None else self.trainable
        kept = flatten_dict(old)
        for path, leaf in flatten_dict(new).items():
            is_matched = _matches(patterns, path)
            if is_matched == (self.trainable is not None) and not self._is_fixed(path):
                kept[path] = leaf
        return unflatten_dict(kept)

    def require_floats(self, params: Any) -> None:
        """Raise `ConfigError` if `params` has integers and nothing selects others."""
        if self.trainable is None and (integers := integer_paths(flatten_dict(params))):
            raise ConfigError(
                f"{'/'.join(integers[0])} is stored in integers and cannot be trained",
                owner="Learner",
                field="trainable",
                value=None,
                expected="patterns of floating weights, such as (LORA_WEIGHTS,) after add_lora",
            )

    @property
    def _is_all(self) -> bool:
        return self.trainable is None and not self.frozen and not self.fixed

    def _is_fixed(self, path: tuple[str, ...]) -> bool:
        return _matches(self.fixed, path)


def _matches(patterns: Iterable[str], path: tuple[str, ...]) -> bool:
    return any(re.fullmatch(pattern, "/".join(path)) for pattern in patterns)


def integer_paths(flat: dict[tuple[str, ...], Any]) -> list[tuple[str, ...]]:
    """Return the paths of the weights that are stored in integers."""
    return [
        path
        for path, leaf in flat.items()
        if hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.integer)
    ]


def weight_path(path: KeyPath) -> tuple[str, ...]:
    """Return the dict keys that the path of an array ends with: the path of its weight.

    Several arrays of one weight, such as those of a combined projection, may be a list there.
    """
    at_weight = itertools.dropwhile(lambda entry: isinstance(entry, SequenceKey), reversed(path))
    keys = itertools.takewhile(lambda entry: isinstance(entry, DictKey), at_weight)
    return tuple(entry.key for entry in keys)[::-1]


class VariationalNoise(Configurable):
    """Normal noise on the weights at which the loss is computed; stored weights do not change.

    Weights that are stored in integers, and their scales, get no noise.

    Each step draws new noise, the same for all rows of its batch. Evaluation and decoding have no
    noise (A. Graves, "Practical Variational Inference for Neural Networks", 2011).

    Attributes:
      scale: Standard deviation.
      weights: Regular expressions, each of which has to match the whole path of at least one
        weight.
      start_step: Number of completed steps before the first step with noise.
    """

    scale: float = 0.0
    weights: Sequence[str] = (".*",)
    start_step: int = 0

    def __post_init__(self) -> None:
        """Check the fields."""
        check_positive("task.vn", scale=self.scale)
        check_integers("task.vn", minimum=0, start_step=self.start_step)
        check_regexes("task.vn", weights=self.weights)

    def add(self, params: Any, key: jax.Array, *, step: jax.Array) -> Any:
        """Return `params`, nested dicts `[...]`, with noise on the weights that match.

        `key` is the random key of the step, the same on every shard of the batch. It raises
        `ConfigError` if a pattern matches no weight.
        """
        key = jax.random.fold_in(key, _NOISE_STREAM)
        scale = jnp.where(step >= self.start_step, jnp.float32(self.scale), 0.0)
        flat = flatten_dict(params)
        names = ["/".join(path) for path in flat]
        noisy: set[str] = set()
        for pattern in self.weights:
            noisy.update(matching_paths(pattern, names, owner="task.vn", field="weights"))
        stored = set(integer_paths(flat))
        stored |= {scale_path(path) for path in stored}
        for path, leaf in flat.items():
            name = "/".join(path)
            if path not in stored and name in noisy:
                leaf_key = jax.random.fold_in(key, zlib.crc32(name.encode()))
                noise = scale * jax.random.normal(leaf_key, leaf.shape, jnp.float32)
                flat[path] = leaf + noise.astype(leaf.dtype)
        return unflatten_dict(flat)


Path = tuple[str, ...]
Declarations = Mapping[Path, WeightBox]
"""Boxes of weights by path; their values are not read."""

Layout = Callable[[Any, tuple[int, ...], Any], jax.sharding.NamedSharding]
"""Function (logical axes, shape, weight) -> sharding of an optimizer's array.

The weight is (logical axes, shape) of the weight of an array of another shape, and else None.
"""

_DECLARED: ContextVar[tuple[Declarations, Layout | None]] = ContextVar("declared")

_DECAY_ARGUMENTS = ("weight_decay", "l1_regularizer_weight", "l2_regularizer_weight")
_MASK_ARGUMENTS = ("mask", "weight_decay_mask")

# Names in a line of the report, before the others are counted.
_MAX_NAMES = 6


def declarations_of(boxed: Any) -> dict[Path, WeightBox]:
    """Return the boxes of a tree of weights without their values; unboxed leaves have none."""
    flat = flatten_dict(boxed, is_leaf=lambda _, leaf: is_box(leaf))
    return {path: box.replace(value=None) for path, box in flat.items() if is_box(box)}


@contextlib.contextmanager
def declared(declarations: Declarations, *, layout: Layout | None = None) -> Iterator[None]:
    """Bind what optimizers read of weights inside the `with` block.

    Args:
      declarations: Declarations that masks of weights read.
      layout: Layout of the optimizer's arrays; None if each device holds them whole.
    """
    token = _DECLARED.set((declarations, layout))
    try:
        yield
    finally:
        _DECLARED.reset(token)


def declaration(path: Path) -> WeightBox | None:
    """Return the bound declaration of a weight; None if it has none."""
    declarations, _ = _DECLARED.get(({}, None))
    return declarations.get(path)


def bound_layout() -> Layout | None:
    """Return the bound layout of the optimizer's arrays; None if each device holds them whole."""
    return _DECLARED.get(({}, None))[1]


def mesh_axes(spec: jax.sharding.PartitionSpec, rank: int) -> list[tuple[str, ...]]:
    """Return the mesh axes that split each dimension of an array."""
    entries = [*spec, *[None] * (rank - len(spec))]
    return [(entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in entries]


def mask_of(
    params: Any, test: Callable[[WeightBox], Any], *, without: Callable[[Any], Any] | None = None
) -> Any:
    """Return a tree of the results of `test` of the declaration of each weight, such as booleans.

    Args:
      params: Boxed weights, or plain ones whose declarations are bound.
      test: Function of a box without its value.
      without: Function of a weight without a declaration, with which it warns; None if that is an
        error.

    Raises:
      ConfigError: A weight has no declaration, and `without` is None.
    """
    undeclared = []

    def mask(path: Any, leaf: Any) -> Any:
        box = leaf if is_box(leaf) else declaration(weight_path(path))
        if box is not None:
            return test(box)
        if without is None:
            raise ConfigError(
                f"the weight {'/'.join(weight_path(path))} has no declaration",
                owner="mask of weights",
                expected="boxed weights, such as those of init_boxed",
            )
        undeclared.append("/".join(weight_path(path)))
        return without(leaf)

    decayed = jax.tree_util.tree_map_with_path(mask, params, is_leaf=is_box)
    if undeclared:
        warnings.warn(
            f"{first_names(undeclared, limit=1)}: weights without a declaration decay if they have"
            " two or more axes, stacked scales and biases too. Give boxed weights, such as those of"
            " init_boxed, or create weights by create_variable.",
            stacklevel=3,
        )
    return decayed


class DecayedWeights(NamedTuple):
    """The weights of an optimizer, by whether it decays them.

    Attributes:
      optimizer: Name of the optimizer; empty for the only one.
      decayed: Paths of the weights that shrink without a gradient.
      spared: Paths of its other weights.
      rate: Function from a step, an int32 scalar, to the learning rate; None for one that the
        optimizer does not tell.
    """

    optimizer: str
    decayed: tuple[Path, ...]
    spared: tuple[Path, ...]
    rate: Callable[[jax.Array], jax.Array | None]

    def lines(
        self, params: Mapping[Path, Any], *, strength: tuple[str, float, bool]
    ) -> Iterator[str]:
        """Yield the lines of the start report.

        Args:
          params: Shapes of the weights by path.
          strength: Argument of the optimizer that asks for decay; see `weight_decay_of`.
        """
        prefix = f"{self.optimizer}: " if self.optimizer else ""
        if self.decayed:
            yield f"decayed      {prefix}{_count_text(self.decayed, params)}"
            if self.spared:
                yield f"not decayed  {prefix}{_count_text(self.spared, params)}"
            return
        if not self.spared:
            yield f"decayed      {prefix}no weight, since it updates none"
            return
        name, number, has_mask = strength
        if number and not has_mask:  # It may accumulate updates of several steps.
            reason = f"{name}={number:g} changed no weight in one step without a gradient"
            yield f"decayed      {prefix}unknown: {reason}"
            return
        reason = f": {name}={number:g} has no effect, because its mask spares all weights"
        yield f"decayed      {prefix}no weight{reason if number else ''}"


def weight_decay_of(optimizer: Any) -> tuple[str, float, bool]:
    """Return (name, value, has a mask) of the argument of an optimizer that asks for decay.

    The optimizers inside its config are searched too. The value is 0 if there is none.
    """
    arguments = optimizer.__arguments__ if isinstance(optimizer, fdl.Buildable) else {}
    has_mask = any(arguments.get(name) is not None for name in _MASK_ARGUMENTS)
    candidates = [
        (name, float(arguments[name]), has_mask)
        for name in _DECAY_ARGUMENTS
        if isinstance(arguments.get(name), (int, float))
    ]
    inner = map(weight_decay_of, arguments.values())
    candidates += [(name, number, has_mask or masked) for name, number, masked in inner]
    return max(candidates, key=lambda one: one[1], default=("weight_decay", 0.0, False))


def _count_text(paths: Iterable[Path], params: Mapping[Path, Any]) -> str:
    """Return the number of weights and entries, and the names of layers by size."""
    sizes: collections.Counter[str] = collections.Counter()
    paths = list(paths)
    for path in paths:
        sizes["/".join(path[-2:])] += math.prod(params[path].shape)
    names = [name for name, _ in sizes.most_common()]
    plural = "" if len(paths) == 1 else "s"
    return (
        f"{len(paths)} weight{plural} with {sizes.total():,} entries:"
        f" {first_names(names, limit=_MAX_NAMES)}"
    )
