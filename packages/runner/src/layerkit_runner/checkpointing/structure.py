"""Names the leaves of a state and compares a stored state with the one that is wanted.

A checkpoint outlives the code that wrote it, so nothing is stored of Python's classes: a state is
a set of leaves, each named by its path (`params/layers/w`, `opt_state/0/mu/layers/w`), with a
shape and a dtype. Both formats store these names; restoring compares them with the target before
any array is read.
"""

from __future__ import annotations

import collections
import dataclasses
import difflib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

LeafPath = tuple[str, ...]

# A model of another depth differs in every layer; a few arrays say as much.
_MOST_SHOWN = 6


class StructureMismatchError(ValueError):
    """The stored state and the wanted one differ in names, shapes or dtypes.

    Attributes:
      differences: One line per leaf, in the order of the paths. The message has the first few.
    """

    def __init__(self, where: str, differences: Sequence[str], *, advice: str):
        self.differences = tuple(differences)
        count = len(self.differences)
        plural = "" if count == 1 else "s"
        lines = "".join(f"\n  {difference}" for difference in self.differences[:_MOST_SHOWN])
        if count > _MOST_SHOWN:
            lines += f"\n  … and {count - _MOST_SHOWN} more"
        super().__init__(
            f"{where} does not fit the state to restore ({count} difference{plural}):{lines}\n"
            f"{advice}"
        )


_FIT_ADVICE = (
    "Nothing is padded or cast. Restore with the configuration that wrote the checkpoint, or start "
    "a new job that is initialised from it."
)
_CAST_ADVICE = (
    "Nothing is cast unasked. Restore with the dtypes that wrote the checkpoint, or say "
    "--restore_cast_dtypes to convert these floating-point numbers."
)


@dataclasses.dataclass(frozen=True)
class LeafSpec:
    """Shape and dtype of a leaf; prints as `float32[4, 8]`."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def num_bytes(self) -> int:
        """Of the array."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.dtype.name}{list(self.shape)}"


def named_leaves(tree: Any) -> dict[LeafPath, Any]:
    """Returns the leaves of any pytree by path, in the tree's own order.

    None and empty containers have no leaves and leave no trace.

    Raises:
      ValueError: if the tree is a bare leaf, or two leaves have the same name.
    """
    leaves: dict[LeafPath, Any] = {}
    for keys, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        path = tuple(jax.tree_util.keystr((key,), simple=True) for key in keys)
        if not path:
            raise ValueError(
                f"The state is a bare {type(leaf).__name__}; expected a tree, such as a dict, "
                "whose leaves have names."
            )
        if path in leaves:
            raise ValueError(
                f"Two leaves of the state are both named {join(path)}, as with the keys 1 and "
                "'1' in one dict; rename one of them."
            )
        leaves[path] = leaf
    return leaves


def check_storable(leaves: Mapping[LeafPath, Any]) -> None:
    """Refuses leaves that a checkpoint cannot hold.

    Raises:
      TypeError: naming every leaf that is not a `jax.Array` of one number or more.
    """
    faults = []
    for path, leaf in leaves.items():
        if not isinstance(leaf, jax.Array):
            faults.append(f"{join(path)} is a {type(leaf).__name__}; make it a jax.Array")
        elif jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            faults.append(f"{join(path)} is a typed random key; store jax.random.key_data of it")
        elif leaf.size == 0:
            faults.append(f"{join(path)} {spec_of(leaf)} has no elements; leave it out")
    if faults:
        raise TypeError("The state cannot be saved:\n  " + "\n  ".join(faults))


def check_target(targets: Mapping[LeafPath, Any]) -> None:
    """Refuses a target that does not say where its arrays are to live.

    Raises:
      ValueError: naming every leaf without a sharding.
    """
    bare = [join(path) for path, leaf in targets.items() if getattr(leaf, "sharding", None) is None]
    if bare:
        raise ValueError(
            "Every leaf of the target needs a sharding, as in jax.ShapeDtypeStruct(shape, dtype, "
            f"sharding=...); these have none: {', '.join(bare)}"
        )


def check_match(
    stored: Mapping[LeafPath, LeafSpec],
    targets: Mapping[LeafPath, Any],
    *,
    where: str,
    cast_dtypes: bool = False,
) -> None:
    """Compares stored leaves with wanted ones.

    Args:
      stored: what the checkpoint holds.
      targets: leaves with a shape and a dtype.
      where: names the checkpoint in the message.
      cast_dtypes: whether floating-point numbers of another width are as good.

    Raises:
      StructureMismatchError: naming the differences by path.
    """
    wanted = {path: spec_of(leaf) for path, leaf in targets.items()}
    unexpected = [join(path) for path in stored if path not in wanted]
    differences: list[str] = []
    may_be_cast: list[str] = []
    for path in sorted(stored.keys() | wanted.keys()):
        name = join(path)
        if path not in stored:
            near = difflib.get_close_matches(name, unexpected, n=1, cutoff=0.8)
            hint = f"; the nearest that it holds is {near[0]}" if near else ""
            differences.append(f"{name}: missing in the checkpoint, wanted {wanted[path]}{hint}")
        elif path not in wanted:
            differences.append(f"{name}: unexpected, {stored[path]} in the checkpoint")
        elif stored[path].shape != wanted[path].shape:
            differences.append(
                f"{name}: shape {list(stored[path].shape)} in the checkpoint, "
                f"wanted {list(wanted[path].shape)}"
            )
        elif stored[path].dtype != wanted[path].dtype:
            castable = is_castable(stored[path].dtype, wanted[path].dtype)
            (may_be_cast if castable else differences).append(
                f"{name}: dtype {stored[path].dtype.name} in the checkpoint, "
                f"wanted {wanted[path].dtype.name}"
            )
    if differences or (may_be_cast and not cast_dtypes):
        advice = _FIT_ADVICE if differences else _CAST_ADVICE
        raise StructureMismatchError(where, sorted(differences + may_be_cast), advice=advice)


def is_castable(stored: np.dtype, wanted: np.dtype) -> bool:
    """Whether both are floating-point dtypes that layers compute and store weights in.

    Eight bits and fewer are left out: their numbers mean nothing without a scale.
    """
    return all(
        jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize > 1 for dtype in (stored, wanted)
    )


def cast_lines(stored: Mapping[LeafPath, LeafSpec], targets: Mapping[LeafPath, Any]) -> list[str]:
    """Says what is cast, one line for each pair of dtypes; empty if nothing is."""
    pairs = collections.Counter(
        (stored[path].dtype.name, spec_of(leaf).dtype.name) for path, leaf in targets.items()
    )
    return [
        f"{count} arrays were converted from {was} to {becomes}"
        for (was, becomes), count in sorted(pairs.items())
        if was != becomes
    ]


def spec_of(leaf: Any) -> LeafSpec:
    """Returns the shape and dtype of an array or of a description of one."""
    return LeafSpec(tuple(leaf.shape), np.dtype(leaf.dtype))


def join(path: LeafPath) -> str:
    """Returns the path as it is shown to people: `params/layers/w`."""
    return "/".join(path)


def nest(leaves: Mapping[LeafPath, Any]) -> dict[str, Any]:
    """Returns plain nested dicts, whose keys are the names along each path."""
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        node = tree
        for name in path[:-1]:
            node = node.setdefault(name, {})
        node[path[-1]] = leaf
    return tree
