"""The values of a step of Paxml, by the names of a run.

Weights that `layerkit.interop.praxis` maps have the names and layouts of the run. The others keep
their names in Praxis, so that rules can refer to them and a comparison reports them. The states of
Adam and ShardedAdafactor follow their weights, whatever the tree of the optimizer is.

Praxis drops the dimension over which a factor or a scale of Adafactor is reduced, our optimizer
keeps it with size 1. Both have the same numbers if the optimizer of the run takes the dimensions of
each weight in the order of Praxis (`layerkit.interop.praxis.axis_order`).
"""

from __future__ import annotations

import dataclasses
import math
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from etils import epath

from layerkit.base.base_layer import PARAMS
from layerkit.interop.praxis import Ranges, Shape, WeightSource, find_sources
from layerkit_runner.checkpointing.errors import DamagedCheckpointError
from layerkit_runner.checkpointing.stored_state import LeafPath, LeafSpec, join, named_leaves
from layerkit_runner.files.bounded_documents import parse_json, read_text
from layerkit_runner.init_from.pax.paxml_folders import open_arrays
from layerkit_runner.optim.optimizer_updates import update

OPT_STATE = "opt_state"
EMA = "ema"
_WEIGHT = re.compile(r"mdl_vars/(?P<collection>[^/]+)/(?P<name>.+)")
_MOMENT = re.compile(
    r"(?P<group>opt_states.*?)/(?P<kind>m|v|mu|nu|ema|m_scale|vr|vc)/params/(?P<name>.+)"
)
_COUNT = "count"
# Moments of Praxis' Adam; those of Optax, which Paxml can use, have other names.
_IS_CORRECTED = re.compile(r"opt_states.*?/[mv]/params/.+")
# Names of Adam's moments in Optax by those in Praxis.
_KINDS = {"m": "mu", "v": "nu", "mu": "mu", "nu": "nu", "ema": EMA}
# Elements by which padding may enlarge an array beyond twice its size. A stored shape bounds the
# memory that its chunks may fill.
_MAX_PADDING = 2**24
_MAX_METADATA_BYTES = 64 * 2**20


# Dimension of a weight in Praxis over which each array of the state is reduced.
_REDUCED_AXES = {"m": None, "m_scale": 0, "vr": -1, "vc": -2, "v": None}


@dataclasses.dataclass(frozen=True)
class _Count:
    """A step count of the optimizer, a number or one for each layer."""

    name: str


@dataclasses.dataclass(frozen=True)
class _Moment:
    """A moment of Adam that Praxis stores after the correction of its bias."""

    source: WeightSource
    decay: float
    count: _Count


@dataclasses.dataclass(frozen=True)
class _Slot:
    """An array of the state that belongs to one weight of this library.

    `stored` is the shape of each array in Praxis, with size 1 in the dropped dimension.
    """

    source: WeightSource
    stored: Shape
    dropped: int | None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the arrays in Praxis."""
        return self.source.names

    def shape_of(self, like: Shape) -> Shape:
        """Return the shape in the state of a run, which has the shape `like`."""
        return self.source.shape_of(self.stored, like)

    def read_block(
        self, read: Callable[[str, Ranges], np.ndarray], shape: Shape, ranges: Ranges
    ) -> np.ndarray:
        """Read a block; see `WeightSource.read_block`."""

        def read_with_all(name: str, block: Ranges) -> np.ndarray:
            if self.dropped is None:
                return read(name, block)
            kept = (*block[: self.dropped], *block[self.dropped + 1 :])
            return np.expand_dims(read(name, kept), self.dropped)

        return self.source.read_block(read_with_all, self.stored, shape, ranges)


_Stored = WeightSource | _Moment | _Slot | _Count | str


class StoredPax:
    """A step of Paxml; `leaves` have the shape and dtype of every value by its path."""

    def __init__(
        self,
        step_folder: epath.Path,
        *,
        step: int,
        like: Mapping[LeafPath, Any],
        optimizer: optax.GradientTransformation | None = None,
    ) -> None:
        """Open a step; only names, shapes and dtypes are read.

        It is searched for the values `like` of the run. Without an optimizer, which has the decays
        of Adam's moments, no moments of Praxis' Adam are read.
        """
        self.step = step
        self.label = f"{step_folder.parent}:{step}"
        self._arrays = open_arrays(step_folder)
        self._shapes = _logical_shapes(step_folder, self._arrays.specs)
        self._decays = {} if optimizer is None else _adam_decays(optimizer)
        self._sources: dict[LeafPath, _Stored] = {}
        self._weights = {
            match["name"]: name
            for name in self._arrays.specs
            if (match := _WEIGHT.fullmatch(name)) and match["collection"] == PARAMS
        }
        ours = [join(path[1:]) for path in like if path[0] == PARAMS]
        sources = find_sources(ours, self._weights.keys())
        for name, source in sources.items():
            self._sources[PARAMS, *name.split("/")] = self._stored(source, self._weights)
        self._add_moments(like, sources)
        self._add_rest(sources)
        self.leaves: Mapping[LeafPath, LeafSpec] = {
            path: self._spec(path, source, like) for path, source in self._sources.items()
        }

    def read(self, like: Mapping[LeafPath, jax.ShapeDtypeStruct]) -> dict[LeafPath, jax.Array]:
        """Read some of the values, each into the sharding of `like`.

        A process reads the chunks of a TensorStore checkpoint that its devices need. A file in
        Flax's format is read whole.
        """
        return {path: self._read(path, target) for path, target in like.items()}

    def _read(self, path: LeafPath, target: jax.ShapeDtypeStruct) -> jax.Array:
        source, shape = self._sources[path], target.shape
        if isinstance(source, _Count):
            count = self._read_count(source)
            return jax.make_array_from_callback(
                shape, target.sharding, lambda index: np.full(shape, count, target.dtype)[index]
            )

        factor = None
        if isinstance(source, _Moment):
            factor = np.float32(1.0 - source.decay ** self._read_count(source.count))
            source = source.source

        def read(index: tuple[slice, ...] | None) -> np.ndarray:
            parts = zip(index or (), shape, strict=True)
            ranges = tuple(slice(*part.indices(size)[:2]) for part, size in parts)
            if isinstance(source, str):
                return self._block(source, ranges)
            if isinstance(source, _Slot):
                return source.read_block(self._block, shape, ranges)
            stored = self._shapes[source.names[0]]
            block = source.read_block(self._block, stored, shape, ranges)
            return block if factor is None else (block * factor).astype(target.dtype)

        return jax.make_array_from_callback(shape, target.sharding, read)

    def _block(self, name: str, ranges: tuple[slice, ...]) -> np.ndarray:
        block = self._arrays.read(name, ranges)
        if jnp.issubdtype(block.dtype, jnp.floating) and not np.isfinite(block).all():
            owner, expected = self.label, "finite numbers"
            raise DamagedCheckpointError(owner=owner, field="array", value=name, expected=expected)
        return block

    def _read_count(self, source: _Count) -> int:
        shape = self._shapes[source.name]
        counts = np.unique(self._arrays.read(source.name, tuple(map(slice, shape))))
        if len(counts) != 1:
            raise DamagedCheckpointError(f"layers differ in {source.name}", owner=self.label)
        return int(counts[0])

    def _stored(self, source: WeightSource, names: Mapping[str, str]) -> WeightSource:
        """Return a source with the names of the stored arrays."""
        return dataclasses.replace(source, names=tuple(names[name] for name in source.names))

    def _add_moments(
        self, like: Mapping[LeafPath, Any], sources: Mapping[str, WeightSource]
    ) -> None:
        """Add the averages, moments and counts of the optimizer."""
        moments: dict[str, dict[str, str]] = {
            kind: {} for kind in (*_KINDS.values(), *_REDUCED_AXES)
        }
        groups: dict[str, str] = {}
        matches = {name: _MOMENT.fullmatch(name) for name in self._arrays.specs}
        factored = {match["group"] for match in matches.values() if match and match["kind"] == "vr"}
        for name, match in matches.items():
            if match:
                kind = match["kind"] if match["group"] in factored else _KINDS[match["kind"]]
                moments[kind][match["name"]] = name
                groups[name] = match["group"]
        for name, source in sources.items():
            if all(one in moments[EMA] for one in source.names):
                self._sources[EMA, *name.split("/")] = self._stored(source, moments[EMA])
        groups_of: dict[LeafPath, str] = {}
        for path in like:
            at = next((i for i, key in enumerate(path) if key in moments and key != EMA), None)
            if path[0] != OPT_STATE or at is None:
                continue
            source_of = sources.get(join(path[at + 1 :]))
            names = moments[path[at]]
            if source_of is None or not all(one in names for one in source_of.names):
                continue
            source = self._stored(source_of, names)
            group = groups[source.names[0]]
            groups_of[path[: at if group in factored else at - 1]] = group
            if group in factored:
                weight_shape = self._shapes[self._weights[source_of.names[0]]]
                if source.lacks_heads(weight_shape, like[PARAMS, *path[at + 1 :]].shape):
                    continue  # Its factors are over other dimensions.
                spec, dtype = self._arrays.specs[source.names[0]], like[path].dtype
                if slot := _find_slot(path[at], source, weight_shape, spec, dtype=dtype):
                    self._sources[path] = slot
            elif not _IS_CORRECTED.fullmatch(source.names[0]):
                self._sources[path] = source
            elif path[at] in self._decays and f"{group}/{_COUNT}" in self._arrays.specs:
                count = _Count(f"{group}/{_COUNT}")
                self._sources[path] = _Moment(source, self._decays[path[at]], count)
        for path in like:
            name = f"{groups_of.get(path[:-2]) or groups_of.get(path[:-1])}/{_COUNT}"
            if path[0] == OPT_STATE and path[-1] == _COUNT and name in self._arrays.specs:
                self._sources[path] = _Count(name)

    def _add_rest(self, sources: Mapping[str, WeightSource]) -> None:
        """Add weights that the map lacks, under their own names."""
        mapped = {name for source in sources.values() for name in source.names}
        for name in self._arrays.specs:
            match = _WEIGHT.fullmatch(name)
            if match and not (match["collection"] == PARAMS and match["name"] in mapped):
                self._sources[match["collection"], *match["name"].split("/")] = name

    def _spec(self, path: LeafPath, source: _Stored, like: Mapping[LeafPath, Any]) -> LeafSpec:
        if isinstance(source, _Count):
            return LeafSpec(tuple(like[path].shape), np.dtype(like[path].dtype))
        if isinstance(source, str):
            return LeafSpec(self._shapes[source], self._arrays.specs[source].dtype)
        if isinstance(source, _Slot):
            return LeafSpec(
                source.shape_of(tuple(like[path].shape)), self._arrays.specs[source.names[0]].dtype
            )
        if isinstance(source, _Moment):
            source = source.source
        shapes = {self._shapes[name] for name in source.names}
        stored = self._shapes[source.names[0]]
        target = like.get(path) or like[PARAMS, *path[1:]]
        try:
            if len(shapes) > 1:
                raise ValueError(f"layers of shapes {sorted(map(list, shapes))}")
            shape = source.shape_of(stored, tuple(target.shape))
        except ValueError as error:
            raise DamagedCheckpointError(
                str(error), owner=self.label, field=source.names[0], value=list(stored)
            ) from error
        return LeafSpec(shape, self._arrays.specs[source.names[0]].dtype)


def _logical_shapes(
    step_folder: epath.Path, specs: Mapping[str, LeafSpec]
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of arrays without the padding of axes that a mesh did not divide."""
    path = step_folder / "metadata" / "metadata"
    if not path.is_file():
        return {name: spec.shape for name, spec in specs.items()}
    try:
        metadata = parse_json(read_text(path, max_bytes=_MAX_METADATA_BYTES))
        recorded: dict[str, tuple[int, ...]] = {}
        if isinstance(metadata, dict):
            _collect_shapes(metadata.get("train_state_metadata"), (), recorded)
    except (ValueError, TypeError) as error:
        raise DamagedCheckpointError(
            f"cannot be read: {error}", field="file", value=str(path), expected="JSON of Paxml"
        ) from error
    shapes: dict[str, tuple[int, ...]] = {}
    for name, spec in specs.items():
        # Moments are padded as their weights are.
        moment = _MOMENT.fullmatch(name)
        shape = recorded.get(f"mdl_vars/params/{moment['name']}" if moment else name, spec.shape)
        fits = len(shape) == len(spec.shape) and all(map(operator.le, shape, spec.shape))
        most = 2 * math.prod(shape) + _MAX_PADDING
        shapes[name] = shape if fits and math.prod(spec.shape) <= most else spec.shape
    return shapes


def _collect_shapes(node: Any, path: LeafPath, shapes: dict[str, tuple[int, ...]]) -> None:
    if not isinstance(node, dict):
        return
    shape = node.get("unpadded_shape")
    if isinstance(shape, list) and all(type(size) is int and size >= 0 for size in shape):
        shapes[join(path)] = tuple(shape)
        return
    for key, child in node.items():
        _collect_shapes(child, (*path, key), shapes)


def _adam_decays(optimizer: optax.GradientTransformation) -> dict[str, float]:
    """Return the decays of Adam's moments by name, as far as the optimizer has them."""
    # One update of a weight with gradient 1 leaves moments of 1 - decay.
    one = {"w": jnp.ones(())}
    state = optimizer.init({"w": jnp.zeros(())})
    _, state = update(
        optimizer, one, state, {"w": jnp.zeros(())}, raw_grads=one, loss=jnp.zeros(())
    )
    return {
        path[-2]: 1.0 - float(leaf)
        for path, leaf in named_leaves(state).items()
        if path[-2:] in (("mu", "w"), ("nu", "w"))
    }


def _find_slot(
    kind: str, source: WeightSource, weight_shape: Shape, spec: LeafSpec, *, dtype: np.dtype
) -> _Slot | None:
    """Return the slot of a weight, or None if the run cannot use the stored array.

    Praxis stores an array of one number for a slot that a weight does not have. The scale of a
    momentum that several weights of this library share does not fit any of them. `weight_shape` is
    that in Praxis, `[...layers, (parts), ...]`; the stored array may be padded.
    """
    axis, rank = _REDUCED_AXES[kind], source.weight.rank
    is_shared = source.weight.part is not None and kind in ("m", "m_scale")
    if is_shared or spec.dtype != dtype or (axis is not None and not -rank <= axis < rank):
        return None
    dropped = None if axis is None else len(weight_shape) - rank + axis % rank
    whole, left = list(weight_shape), list(weight_shape)
    if dropped is not None:
        whole[dropped] = 1
        del left[dropped]
    fits = len(left) == len(spec.shape) and all(map(operator.le, left, spec.shape))
    return _Slot(source, tuple(whole), dropped) if fits else None
