"""Where logical axis names meet the axes of a device mesh.

A weight says `axes=('embed', 'mlp')`, an activation is constrained by names such as `('batch',
'length', 'act_embed')`, and one table of rules, `ShardingRules`, says which mesh axes each name is
split over. Nothing else in the library knows mesh axes, so the same model runs on any mesh.

The partitioner binds a table to a mesh once (`BoundSharding`) and sets it on the model; layers
never read an ambient context.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from layerkit.near_names import near_names

MeshAxes = str | tuple[str, ...] | None
LogicalAxes = Sequence[str | None]

# Mesh axes that a rule may name although the mesh at hand lacks them (their size is then 1).
STANDARD_MESH_AXES = ("data", "fsdp", "tensor", "stage", "expert", "context")


@dataclasses.dataclass(frozen=True)
class ShardingRules:
    """Which mesh axes each logical axis name is split over; None means replicated.

    Make one with `ShardingRules.of(embed="fsdp", mlp="tensor", …)` or from the default table with
    `DEFAULT_RULES.replace(…)` (names that exist) and `.extend(…)` (names of your own).
    """

    table: tuple[tuple[str, MeshAxes], ...]

    @classmethod
    def of(cls, **rules: MeshAxes | list[str]) -> ShardingRules:
        """A table of exactly these rules; several mesh axes in a tuple or a list."""
        # Tuples throughout: a table is part of the key of JAX's caches.
        table = {n: tuple(axes) if isinstance(axes, list) else axes for n, axes in rules.items()}
        return cls(tuple(sorted(table.items())))

    def replace(self, **rules: MeshAxes | list[str]) -> ShardingRules:
        """This table with some rules changed.

        Raises:
          ValueError: a name that the table does not have.
        """
        table = dict(self.table)
        for name in rules:
            if name not in table:
                raise ValueError(
                    f"no sharding rule for {name!r}{near_names(name, table)}"
                    " Use extend() to add a logical axis."
                )
        return ShardingRules.of(**{**table, **rules})

    def extend(self, **rules: MeshAxes | list[str]) -> ShardingRules:
        """This table with new logical axes."""
        return ShardingRules.of(**{**dict(self.table), **rules})

    def mesh_axes(self, name: str, *, owner: str = "") -> tuple[str, ...]:
        """The mesh axes of one logical name.

        Raises:
          ValueError: the name has no rule; says whose it is and which is near.
        """
        table = dict(self.table)
        if name not in table:
            where = f"{owner}: " if owner else ""
            raise ValueError(
                f"{where}no sharding rule for logical axis {name!r}{near_names(name, table)}"
                f" Known: {', '.join(table)}."
            )
        axes = table[name]
        if axes is None:
            return ()
        return (axes,) if isinstance(axes, str) else tuple(axes)


# Weights: the model dimension is split over fsdp (gathered just before use), the wide dimension
# over tensor. Activations: rows over data and fsdp, the wide dimension over tensor. Rows are split
# over expert too, so that what is no expert is not computed twice; where experts are split over it,
# their rows are split over the others alone.
DEFAULT_RULES = ShardingRules.of(
    # weights
    embed="fsdp",
    mlp="tensor",
    heads="tensor",
    kv_heads="tensor",
    head_dim=None,
    vocab="tensor",
    norm=None,
    positions=None,
    layers=None,
    stage="stage",
    expert="expert",
    # activations
    batch=("data", "fsdp", "expert"),
    expert_batch=("data", "fsdp"),
    length="context",
    act_embed=None,
    act_mlp="tensor",
    act_heads="tensor",
    act_kv_heads="tensor",
    act_vocab="tensor",
)

# Dimensions that are one however large the mesh is, and then stay whole: the tokens of a cached
# step, and the key heads of multi-query attention.
_WHOLE_WHERE_ONE = ("length", "kv_heads", "act_kv_heads")

# Dimensions that are always split evenly: data come in equal parts, rings and pipelines pass them
# on, and each layer of a stack is one device's.
_ALWAYS_EVEN = ("batch", "expert_batch", "length", "stage", "layers")
# So are all dimensions of what has this one: each device works out its own experts (`shard_map`).
_EVEN_IN_ALL = "expert"


@dataclasses.dataclass(frozen=True)
class BoundSharding:
    """A table of rules bound to a mesh.

    Attributes:
      mesh: The devices and their named axes; None for a mode without sharding (names are then still
        checked, and constraints do nothing).
      rules: The table.

    Raises:
      ValueError: a rule names a mesh axis that is neither in the mesh nor a standard one.
    """

    mesh: Mesh | None
    rules: ShardingRules = DEFAULT_RULES

    def __post_init__(self) -> None:
        mesh_axes = () if self.mesh is None else self.mesh.axis_names
        for name, _ in self.rules.table:
            for axis in self.rules.mesh_axes(name):
                if axis not in mesh_axes and axis not in STANDARD_MESH_AXES:
                    valid = [*mesh_axes, *STANDARD_MESH_AXES]
                    raise ValueError(
                        f"the rule for {name!r} names mesh axis {axis!r}{near_names(axis, valid)}"
                        f" The mesh has {', '.join(mesh_axes)}."
                    )

    def spec(
        self,
        axes: LogicalAxes,
        *,
        shape: Sequence[int] | None = None,
        owner: str = "",
        allow_uneven: bool = False,
    ) -> PartitionSpec:
        """The PartitionSpec of an array with these logical axes.

        Args:
          axes: One name (or None) per dimension.
          shape: When given, every dimension must be divisible by its mesh axes; a single token or
            key head is left whole.
          owner: Whose array it is, for error messages.
          allow_uneven: Whether features, such as a vocabulary, need only have an entry for each
            part. Such an array exists inside of `jit` alone, where XLA pads it; rows, positions,
            layers, stages and the arrays of experts must be divisible all the same.

        Raises:
          ValueError: an unknown name, one mesh axis used by two dimensions, a number of names that
            differs from the rank, or a dimension that cannot be split evenly.
        """
        where = f"{owner}: " if owner else ""
        if shape is not None and len(axes) != len(shape):
            raise ValueError(
                f"{where}axes {tuple(axes)} do not name the dimensions of {tuple(shape)}"
            )
        sizes: Mapping[str, int] = {} if self.mesh is None else dict(self.mesh.shape)
        may_be_uneven = allow_uneven and _EVEN_IN_ALL not in axes
        taken: dict[str, str] = {}
        entries: list[Any] = []
        for position, name in enumerate(axes):
            wanted = () if name is None else self.rules.mesh_axes(name, owner=owner)
            if shape is not None and shape[position] == 1 and name in _WHOLE_WHERE_ONE:
                wanted = ()
            used = tuple(axis for axis in wanted if sizes.get(axis, 1) > 1)
            for axis in used:
                if axis in taken:
                    raise ValueError(
                        f"{where}axes {tuple(axes)}: {taken[axis]!r} and {name!r} are both split"
                        f" over mesh axis {axis!r}; change the rule of one of them"
                    )
                taken[axis] = str(name)
            parts = math.prod(sizes[axis] for axis in used)
            size = parts if shape is None else shape[position]
            is_paddable = may_be_uneven and name not in _ALWAYS_EVEN and size > parts
            if size % parts and not is_paddable:
                raise ValueError(
                    f"{where}dimension {name!r} of size {size} cannot be split evenly"
                    f" over mesh axes {used} of size {parts}; use another mesh, another size, or"
                    f" ShardingRules.replace({name}=None)"
                )
            entries.append(used[0] if len(used) == 1 else used or None)
        return PartitionSpec(*entries)

    def is_split(self, name: str) -> bool:
        """Whether arrays are split along this logical axis; not so for a name without a rule."""
        if self.mesh is None or name not in dict(self.rules.table):
            return False
        return any(self.mesh.shape.get(axis, 1) > 1 for axis in self.rules.mesh_axes(name))

    def sharding(
        self, axes: LogicalAxes, *, shape: Sequence[int] | None = None, owner: str = ""
    ) -> NamedSharding:
        """Like `spec`, as a NamedSharding on the mesh."""
        if self.mesh is None:
            raise ValueError("this BoundSharding has no mesh")
        return NamedSharding(self.mesh, self.spec(axes, shape=shape, owner=owner))

    def constrain(self, x: jax.Array, axes: LogicalAxes, *, owner: str = "") -> jax.Array:
        """Asks the compiler to lay `x` `[...]` out by these names; the values do not change.

        Under `jit`, features may be split unevenly; see `spec`.
        """
        if len(axes) != x.ndim:
            raise ValueError(f"{owner}: axes {tuple(axes)} do not name the dimensions of {x.shape}")
        is_traced = isinstance(x, jax.core.Tracer)
        spec = self.spec(axes, shape=x.shape, owner=owner, allow_uneven=is_traced)
        if self.mesh is None:
            return x
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))
