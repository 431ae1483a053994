"""Masks of decayed weights from the declarations of weights, and the lines that report them.

A weight declares whether it decays (`layerkit.WeightHParams.decays`). Optimizers call a mask with
plain arrays, so a task binds the declarations of its model around each call of the learner.
"""

from __future__ import annotations

import collections
import contextlib
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple

import fiddle as fdl
import jax
from flax.traverse_util import flatten_dict

from layerkit.base.weights import WeightBox, is_box
from layerkit.errors import ConfigError, first_names
from layerkit_runner.optim.weight_patterns import weight_path

Path = tuple[str, ...]
Declarations = Mapping[Path, WeightBox]
"""Boxes of weights by path; their values are not read."""

_DECLARED: ContextVar[Declarations] = ContextVar("declared")

_DECAY_ARGUMENTS = ("weight_decay", "l1_regularizer_weight", "l2_regularizer_weight")

# Names in a line of the report, before the others are counted.
_MAX_NAMES = 6


def declarations_of(boxed: Any) -> dict[Path, WeightBox]:
    """Return the boxes of a tree of weights without their values; unboxed leaves have none."""
    flat = flatten_dict(boxed, is_leaf=lambda _, leaf: is_box(leaf))
    return {path: box.replace(value=None) for path, box in flat.items() if is_box(box)}


@contextlib.contextmanager
def declared(declarations: Declarations) -> Iterator[None]:
    """Bind the declarations that masks of decayed weights read inside the `with` block."""
    token = _DECLARED.set(declarations)
    try:
        yield
    finally:
        _DECLARED.reset(token)


def mask_of(
    params: Any, test: Callable[[WeightBox], bool], *, without: Callable[[Any], bool] | None = None
) -> Any:
    """Return a tree of booleans: `test` of the declaration of each weight.

    Args:
      params: Boxed weights, or plain ones whose declarations are bound.
      test: Function of a box without its value.
      without: Function of a weight without a declaration, with which it warns; None if that is an
        error.

    Raises:
      ConfigError: A weight has no declaration, and `without` is None.
    """
    declarations, undeclared = _DECLARED.get({}), []

    def mask(path: Any, leaf: Any) -> bool:
        box = leaf if is_box(leaf) else declarations.get(weight_path(path))
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
    """

    optimizer: str
    decayed: tuple[Path, ...]
    spared: tuple[Path, ...]

    def lines(self, params: Mapping[Path, Any], *, strength: tuple[str, float]) -> Iterator[str]:
        """Yield the lines of the start report.

        Args:
          params: Shapes of the weights by path.
          strength: Argument of the optimizer that asks for decay, and its value; see
            `weight_decay_of`.
        """
        prefix = f"{self.optimizer}: " if self.optimizer else ""
        if self.decayed:
            yield f"decayed      {prefix}{_count_text(self.decayed, params)}"
            if self.spared:
                yield f"not decayed  {prefix}{_count_text(self.spared, params)}"
            return
        name, number = strength
        reason = f": {name}={number:g} has no effect, because its mask spares all weights"
        yield f"decayed      {prefix}no weight{reason if number else ''}"


def weight_decay_of(optimizer: Any) -> tuple[str, float]:
    """Return (name, value) of the argument of an optimizer's config that asks for decay.

    The optimizers inside it are searched too. The value is 0 if there is none.
    """
    arguments = optimizer.__arguments__ if isinstance(optimizer, fdl.Buildable) else {}
    candidates = [
        (name, float(arguments[name]))
        for name in _DECAY_ARGUMENTS
        if isinstance(arguments.get(name), (int, float))
    ]
    candidates += map(weight_decay_of, arguments.values())
    return max(candidates, key=lambda candidate: candidate[1], default=("weight_decay", 0.0))


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
