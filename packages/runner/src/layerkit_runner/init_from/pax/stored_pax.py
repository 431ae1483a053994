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
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from etils import epath

from layerkit.base.base_layer import PARAMS
from layerkit.interop.praxis import Shape, WeightSource, find_sources
from layerkit_runner.checkpointing.errors import DamagedCheckpointError
from layerkit_runner.checkpointing.stored_state import (
    OPT_STATE,
    LeafPath,
    LeafSpec,
    join,
    named_leaves,
    spec_of,
)
from layerkit_runner.files.bounded_documents import parse_json, read_text
from layerkit_runner.init_from.pax.paxml_folders import open_arrays
from layerkit_runner.optim.optimizer_updates import update

if TYPE_CHECKING:
    import tensorstore as ts

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
class _View:
    """A value that is read from stored arrays, of which the first is `name`.

    `correction` is the decay and the step count of a moment of Adam, which Praxis stores after the
    correction of its bias.
    """

    view: ts.TensorStore
    name: str
    correction: tuple[float, _Count] | None = None


class StoredPax:
    """A step of Paxml; `leaves` have the shape and dtype of every value by its path."""

    hugging_face = None

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
        self._like = like
        self._values: dict[LeafPath, _View | _Count] = {}
        self._weights = {
            match["name"]: name
            for name in self._arrays.specs
            if (match := _WEIGHT.fullmatch(name)) and match["collection"] == PARAMS
        }
        ours = [join(path[1:]) for path in like if path[0] == PARAMS]
        sources = find_sources(ours, self._weights.keys())
        for name, source in sources.items():
            self._add((PARAMS, *name.split("/")), self._stored(source, self._weights))
        self._add_moments(sources)
        self._add_rest(sources)
        self.leaves: Mapping[LeafPath, LeafSpec] = {
            path: LeafSpec(tuple(value.view.shape), value.view.dtype.numpy_dtype)
            if isinstance(value, _View)
            else spec_of(like[path])
            for path, value in self._values.items()
        }

    def read(self, like: Mapping[LeafPath, jax.ShapeDtypeStruct]) -> dict[LeafPath, jax.Array]:
        """Read some of the values, each into the sharding of `like`.

        A process reads the chunks of a TensorStore checkpoint that its devices need. A file in
        Flax's format is read whole.
        """
        return {path: self._read(path, target) for path, target in like.items()}

    def _read(self, path: LeafPath, target: jax.ShapeDtypeStruct) -> jax.Array:
        value, shape = self._values[path], target.shape
        if isinstance(value, _Count):
            count = self._read_count(value)
            return jax.make_array_from_callback(
                shape, target.sharding, lambda index: np.full(shape, count, target.dtype)[index]
            )
        factor = None
        if value.correction is not None:
            decay, steps = value.correction
            factor = np.float32(1.0 - decay ** self._read_count(steps))

        def read(index: tuple[slice, ...] | None) -> np.ndarray:
            block = self._arrays.read(value.name, value.view[index or ()])
            if jnp.issubdtype(block.dtype, jnp.floating) and not np.isfinite(block).all():
                owner, expected = self.label, "finite numbers"
                raise DamagedCheckpointError(
                    owner=owner, field="array", value=value.name, expected=expected
                )
            return block if factor is None else (block * factor).astype(target.dtype)

        return jax.make_array_from_callback(shape, target.sharding, read)

    def _read_count(self, source: _Count) -> int:
        counts = np.unique(self._arrays.read(source.name, self._open(source.name)))
        if len(counts) != 1:
            raise DamagedCheckpointError(f"layers differ in {source.name}", owner=self.label)
        return int(counts[0])

    def _open(self, name: str) -> ts.TensorStore:
        """Return an array without the padding of axes that a mesh did not divide."""
        return self._arrays.by_name[name][tuple(map(slice, self._shapes[name]))]

    def _add(
        self,
        path: LeafPath,
        source: WeightSource,
        *,
        open_array: Callable[[str], ts.TensorStore] | None = None,
        correction: tuple[float, _Count] | None = None,
    ) -> None:
        name, like = source.names[0], self._like.get(path) or self._like[PARAMS, *path[1:]]
        try:
            view = source.view(open_array or self._open, tuple(like.shape))
        except (ValueError, IndexError) as error:
            raise DamagedCheckpointError(
                str(error), owner=self.label, field=name, value=list(self._shapes[name])
            ) from error
        if view is not None:
            self._values[path] = _View(view, name, correction)

    def _stored(self, source: WeightSource, names: Mapping[str, str]) -> WeightSource:
        """Return a source with the names of the stored arrays."""
        return dataclasses.replace(source, names=tuple(names[name] for name in source.names))

    def _add_moments(self, sources: Mapping[str, WeightSource]) -> None:
        """Add the averages, moments and counts of the optimizer."""
        like = self._like
        moments: dict[str, dict[str, str]] = {
            kind: {} for kind in (*_KINDS.values(), *_REDUCED_AXES)
        }
        groups: dict[str, str] = {}
        arrays = self._arrays.by_name
        matches = {name: _MOMENT.fullmatch(name) for name in arrays}
        factored = {match["group"] for match in matches.values() if match and match["kind"] == "vr"}
        for name, match in matches.items():
            if match:
                kind = match["kind"] if match["group"] in factored else _KINDS[match["kind"]]
                moments[kind][match["name"]] = name
                groups[name] = match["group"]
        for name, source in sources.items():
            if all(one in moments[EMA] for one in source.names):
                self._add((EMA, *name.split("/")), self._stored(source, moments[EMA]))
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
                index = _index_of_slot(path[at], source, weight_shape, spec, dtype=dtype)
                if index is not None:
                    opened = {name: arrays[name][index] for name in source.names}
                    self._add(path, source, open_array=opened.__getitem__)
            elif not _IS_CORRECTED.fullmatch(source.names[0]):
                self._add(path, source)
            elif path[at] in self._decays and f"{group}/{_COUNT}" in self._arrays.specs:
                count = _Count(f"{group}/{_COUNT}")
                self._add(path, source, correction=(self._decays[path[at]], count))
        for path in like:
            name = f"{groups_of.get(path[:-2]) or groups_of.get(path[:-1])}/{_COUNT}"
            if path[0] == OPT_STATE and path[-1] == _COUNT and name in self._arrays.specs:
                self._values[path] = _Count(name)

    def _add_rest(self, sources: Mapping[str, WeightSource]) -> None:
        """Add weights that the map lacks, under their own names."""
        mapped = {name for source in sources.values() for name in source.names}
        for name in self._arrays.specs:
            match = _WEIGHT.fullmatch(name)
            if match and not (match["collection"] == PARAMS and match["name"] in mapped):
                path = match["collection"], *match["name"].split("/")
                self._values[path] = _View(self._open(name), name)


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


def _index_of_slot(
    kind: str, source: WeightSource, weight_shape: Shape, spec: LeafSpec, *, dtype: np.dtype
) -> tuple[slice | None, ...] | None:
    """Return the index that gives an array of the state the dimensions of its weight in Praxis.

    It adds the dropped dimension with size 1 and leaves out padding. None if the run cannot use the
    array: Praxis stores an array of one number for a slot that a weight does not have. The scale of
    a momentum that several weights of this library share does not fit any of them. `weight_shape`
    is that in Praxis, `[...layers, (parts), ...]`.
    """
    axis, rank = _REDUCED_AXES[kind], source.weight.rank
    is_shared = source.weight.part is not None and kind in ("m", "m_scale")
    if is_shared or spec.dtype != dtype or (axis is not None and not -rank <= axis < rank):
        return None
    index: list[slice | None] = [slice(0, size) for size in weight_shape]
    left = list(weight_shape)
    if axis is not None:
        dropped = len(weight_shape) - rank + axis % rank
        index[dropped] = None
        del left[dropped]
    fits = len(left) == len(spec.shape) and all(map(operator.le, left, spec.shape))
    return tuple(index) if fits else None
