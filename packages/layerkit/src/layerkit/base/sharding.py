"""Sharding rules, which map logical axis names of arrays to the axes of a device mesh.

A weight declares `axes=('embed', 'mlp')`, and an activation is constrained by names such as
`('batch', 'length', 'act_embed')`. One table, `ShardingRules`, maps each name to the mesh axes that
split it. No other module names mesh axes, so the same model runs on any mesh.

The partitioner binds a table to a mesh once (`BoundSharding`) and sets it on the model. Layers
never read an ambient context.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from layerkit.config.checks import check_choice, require
from layerkit.errors import ConfigError

MeshAxes = str | tuple[str, ...] | None
LogicalAxes = Sequence[str | None]

# Mesh axes that a rule may name even if the mesh lacks them. Their size is then 1.
STANDARD_MESH_AXES = ("data", "fsdp", "tensor", "stage", "expert", "context")

HOST_MEMORY = "pinned_host"
"""JAX's kind of the host memory from which devices copy."""


@dataclasses.dataclass(frozen=True)
class ShardingRules:
    """A table from logical axis names to the mesh axes that split them; None means replicated.

    Make one with `ShardingRules.of(embed="fsdp", mlp="tensor", …)`, or from the default table with
    `DEFAULT_RULES.replace(…)` for names that exist and `.extend(…)` for custom names.
    """

    table: tuple[tuple[str, MeshAxes], ...]

    @classmethod
    def of(cls, **rules: MeshAxes | list[str]) -> ShardingRules:
        """Return a table of exactly these rules; several mesh axes form a tuple or a list."""
        # Tuples can be hashed. The table is part of the keys of JAX's caches.
        table = {n: tuple(axes) if isinstance(axes, list) else axes for n, axes in rules.items()}
        return cls(tuple(sorted(table.items())))

    def replace(self, **rules: MeshAxes | list[str]) -> ShardingRules:
        """Return this table with some rules changed.

        Raises:
          ConfigError: The table does not have one of the names.
        """
        for name in rules:
            self.mesh_axes(name)
        return self.extend(**rules)

    def extend(self, **rules: MeshAxes | list[str]) -> ShardingRules:
        """Return this table with rules of new logical axes."""
        return ShardingRules.of(**{**dict(self.table), **rules})

    def mesh_axes(self, name: str, *, owner: str = "") -> tuple[str, ...]:
        """Return the mesh axes of a logical axis name.

        Args:
          name: Logical axis name.
          owner: Owner of the array, for error messages.

        Raises:
          ConfigError: The name has no rule.
        """
        table = dict(self.table)
        if name not in table:
            raise ConfigError(
                "no sharding rule",
                owner=owner or None,
                field="logical axis",
                value=name,
                choices=table,
                hint="Add a new logical axis by ShardingRules.extend().",
            )
        axes = table[name]
        if axes is None:
            return ()
        return (axes,) if isinstance(axes, str) else tuple(axes)


# The model dimension of weights is split over fsdp and gathered just before use. The hidden
# dimension of weights and activations is split over tensor. Rows of activations are split over
# data, fsdp and expert, so that layers without experts do not repeat work. Rows within an expert
# are split over data and fsdp only. With residual_length=("context", "tensor"), norms and residuals
# are split over tensor as well (`layerkit.layers.transformer.transformer`).
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
    residual_length="context",
    act_embed=None,
    act_mlp="tensor",
    act_heads="tensor",
    act_kv_heads="tensor",
    act_vocab="tensor",
)

# Dimensions that are not split if their size is 1: the tokens of a cached step, and the key heads
# of multi-query attention.
_UNSPLIT_IF_ONE = ("length", "residual_length", "kv_heads", "act_kv_heads")

# Dimensions that must be split evenly: batches have equal shards, ring attention and pipelines pass
# equal blocks between devices, and each layer of a stack belongs to one device.
_ALWAYS_EVEN = ("batch", "expert_batch", "length", "residual_length", "stage", "layers")
# All dimensions of arrays with this axis must be split evenly, since `shard_map` computes experts.
_EVEN_ARRAY_AXIS = "expert"


@dataclasses.dataclass(frozen=True)
class BoundSharding:
    """Sharding rules bound to a mesh.

    Attributes:
      mesh: Devices and their named axes, or a `jax.sharding.AbstractMesh` without devices, for
        `spec`; None for a mode without sharding, in which names are still
        checked and constraints do nothing.
      rules: Table of rules.

    Raises:
      ConfigError: A rule names a mesh axis that is neither in the mesh nor a standard one, or the
        mesh axes of `residual_length` do not begin with those of `length`.
    """

    mesh: Mesh | AbstractMesh | None
    rules: ShardingRules = DEFAULT_RULES

    def __post_init__(self) -> None:
        """Raise `ConfigError` for an unknown mesh axis, or a residual split unlike its rows."""
        mesh_axes = () if self.mesh is None else self.mesh.axis_names
        for name, _ in self.rules.table:
            for axis in self.rules.mesh_axes(name):
                owner = f"sharding rule {name}"
                check_choice(owner, (*mesh_axes, *STANDARD_MESH_AXES), **{"mesh axis": axis})
        length, residual = self.split_axes("length"), self.split_axes("residual_length")
        if "residual_length" in dict(self.rules.table):
            expected = f"axes that begin with those of length, {length}"
            starts_with = residual[: len(length)] == length
            require(starts_with, None, "mesh axes of residual_length", residual, expected)

    def spec(
        self,
        axes: LogicalAxes,
        *,
        shape: Sequence[int] | None = None,
        owner: str = "",
        allow_uneven: bool = False,
    ) -> PartitionSpec:
        """Return the PartitionSpec of an array with these logical axes.

        Mesh axes of size 1 are left out: on one device, every entry is None.

        Args:
          axes: Logical axis name, or None, of each dimension.
          shape: Shape of the array. If given, each dimension must be divisible by the size of its
            mesh axes; a single token or key head is not split.
          owner: Owner of the array, for error messages.
          allow_uneven: Allow features, such as a vocabulary, that are larger than the mesh axes but
            not divisible. XLA pads such an array, which can exist only inside of `jit`. Rows,
            positions, layers, stages and the arrays of experts must be divisible nevertheless.

        Raises:
          ConfigError: A name is unknown, two dimensions use one mesh axis, the number of names
            differs from the rank, or a dimension cannot be split evenly.
        """
        if shape is not None:
            expected = f"one name for each dimension of shape {tuple(shape)}"
            require(len(axes) == len(shape), owner or None, "axes", tuple(axes), expected)
        sizes: Mapping[str, int] = {} if self.mesh is None else dict(self.mesh.shape)
        may_be_uneven = allow_uneven and _EVEN_ARRAY_AXIS not in axes
        entries: list[tuple[str, ...]] = []
        for position, name in enumerate(axes):
            used = () if name is None else self.rules.mesh_axes(name, owner=owner)
            if shape is not None and shape[position] == 1 and name in _UNSPLIT_IF_ONE:
                used = ()
            used = tuple(axis for axis in used if sizes.get(axis, 1) > 1)
            parts = math.prod(sizes[axis] for axis in used)
            size = parts if shape is None else shape[position]
            is_paddable = may_be_uneven and name not in _ALWAYS_EVEN and size > parts
            if size % parts and not is_paddable:
                raise ConfigError(
                    "cannot be split evenly",
                    owner=owner or None,
                    field=f"dimension {name!r}",
                    value=size,
                    expected=f"a multiple of {parts}, the size of mesh axes {used}",
                    hint=f"Use another mesh, another size, or ShardingRules.replace({name}=None).",
                )
            entries.append(used)
        repeated = [axis for axis, count in Counter(sum(entries, ())).items() if count > 1]
        expected = f"dimensions that do not share the mesh axes {repeated}"
        require(not repeated, owner or None, "axes", tuple(axes), expected)
        return PartitionSpec(*(axes[0] if len(axes) == 1 else axes or None for axes in entries))

    def num_shards(self, name: str) -> int:
        """Return the number of parts of a logical axis; 1 for a name without a rule."""
        sizes = {} if self.mesh is None else dict(self.mesh.shape)
        return math.prod(sizes[axis] for axis in self.split_axes(name))

    def is_split(self, name: str) -> bool:
        """Return whether arrays are split along a logical axis; False for a name without a rule."""
        return self.num_shards(name) > 1

    def sharding(
        self, axes: LogicalAxes, *, shape: Sequence[int] | None = None, owner: str = ""
    ) -> NamedSharding:
        """Return the NamedSharding of an array on the mesh; see `spec` for arguments and errors."""
        if self.mesh is None:
            raise ConfigError(owner="BoundSharding", field="mesh", value=None, expected="a mesh")
        return NamedSharding(self.mesh, self.spec(axes, shape=shape, owner=owner))

    def split_axes(self, name: str) -> tuple[str, ...]:
        """Return the mesh axes, larger than 1, of a logical axis; none for one without a rule."""
        if self.mesh is None or name not in dict(self.rules.table):
            return ()
        axes = self.rules.mesh_axes(name)
        return tuple(axis for axis in axes if self.mesh.shape.get(axis, 1) > 1)

    def constrain(
        self,
        x: jax.Array,
        axes: LogicalAxes,
        *,
        gradient_axes: LogicalAxes | None = None,
        owner: str = "",
    ) -> jax.Array:
        """Constrain the layout of `x` `[...]` to these logical axes; its values do not change.

        Features may be split unevenly under `jit`; see `spec`.

        Args:
          x: Array.
          axes: Logical axes of `x`.
          gradient_axes: Logical axes of its gradient; None for `axes`. Where a weight is gathered,
            those of the weight: its gradient is then reduced and scattered, and never whole.
          owner: Path of the layer, for errors.
        """
        is_traced = isinstance(x, jax.core.Tracer)
        spec = self.spec(axes, shape=x.shape, owner=owner, allow_uneven=is_traced)
        if self.mesh is None:
            return x
        place = functools.partial(
            jax.lax.with_sharding_constraint, shardings=NamedSharding(self.mesh, spec)
        )
        if gradient_axes is None:
            return place(x)
        run = jax.custom_jvp(place)
        run.defjvps(lambda x_dot, *_: self.constrain(x_dot, gradient_axes, owner=owner))
        return run(x)


def model_device(sharding: BoundSharding | None) -> Any:
    """Return one of the devices that run a model, or an abstract one.

    Args:
      sharding: Sharding of the model, whose mesh may consist of planned devices. None or without a
        mesh for the devices of a surrounding `shard_map`, or else JAX's.
    """
    if sharding is not None and sharding.mesh is not None:
        return sharding.mesh.devices.flat[0]
    return jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]


def is_single_cpu(sharding: BoundSharding | None) -> bool:
    """Return whether a model runs on one CPU device, whose compiler has slow cases of its own.

    Several CPU devices simulate accelerators, whose program should be theirs.

    Args:
      sharding: Sharding of the model; None or without a mesh for JAX's devices.
    """
    if sharding is None or sharding.mesh is None:
        devices = jax.devices()
    elif isinstance(sharding.mesh, AbstractMesh):
        return False
    else:
        devices = list(sharding.mesh.devices.flat)
    return len(devices) == 1 and devices[0].platform == "cpu"
