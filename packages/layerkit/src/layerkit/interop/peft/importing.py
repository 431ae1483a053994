"""Import of adapters from folders of PEFT, one or the weighted sum of several.

A template of a layer has one rank and one alpha, whereas modules of PEFT may have several. Smaller
ranks are filled with zeros, which have no gradients, and other factors go into B. A tensor that
joins several weights, such as `qkv_proj`, gives all of them its A and each its part of B.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from layerkit.config import Config, build, field_names, walk_configs
from layerkit.config.checks import require
from layerkit.interop.hugging_face.exporting import describe
from layerkit.interop.hugging_face.families import FAMILIES
from layerkit.interop.hugging_face.family import Family
from layerkit.interop.hugging_face.folder import same_tensor
from layerkit.interop.hugging_face.importing import TensorMismatchError
from layerkit.interop.hugging_face.layouts import Layout
from layerkit.interop.hugging_face.tensors import (
    Index,
    Path,
    Piece,
    dissect,
    group_by_tensor,
    group_by_weight,
    pieces_of,
)
from layerkit.interop.peft.adapter_folder import MAX_SHOWN, AdapterFolder
from layerkit.layers.basic.dots import weight_of_dot
from layerkit.layers.quantization.lora import (
    add_lora,
    column_norms,
    is_lora,
    lora_dots,
    lora_scale,
    strip_lora,
)
from layerkit.layers.quantization.stored_weights import strip_weight_formats

WEIGHT = ".weight"
"""Suffix of the tensor of a module that has an adapter."""
Folders = Mapping[str, float]


class _Part(NamedTuple):
    """A part of a value: a piece in a folder, and the factor of its adapter."""

    folder: AdapterFolder
    piece: Piece
    scale: float


class PlacedAdapters:
    """Adapters of folders, matched with the weights of a model that has adapters.

    Attributes:
      dots: Config of each `LoraDot` by the path of its variables.
      weights: Weights of the model by path.
      sizes: Rank and factor of B·A that the folders need, by id of the config of a `LoraDot`.
      shapes: Shape of each value that the folders have, by path.
    """

    def __init__(self, folders: Sequence[AdapterFolder], config: Config):
        """Match the modules of the folders; `config` is that of a `LanguageModel` or the like.

        Raises:
          UnsupportedModelError: No family has the model.
          TensorMismatchError: A folder has tensors that the model lacks.
          ConfigError: Folders cannot be added.
        """
        self.dots = lora_dots(config)
        # Several families may have the model, such as Llama and Phi 3 with joined tensors.
        names = {module.rpartition(".")[2] for folder in folders for module in folder.modules}
        families = sorted(FAMILIES, key=lambda family: len(names - _module_names(family)))
        self._family, self.weights, self._groups = model_pieces(config, families)
        self._parts: dict[Path, dict[Index, list[_Part]]] = {}  # of a value, by path and index
        for folder in folders:
            is_alone = len(folders) == 1 and folder.weight == 1.0
            needs_one = folder.has_magnitude or bool(folder.saved)
            expected = "one folder of weight 1, since norms (DoRA) and saved modules have no sum"
            require(is_alone or not needs_one, str(folder.path), "weight", folder.weight, expected)
            if unknown := self._place_modules(folder) + self._place_saved(folder):
                raise TensorMismatchError(
                    "the model cannot have these parts of the adapter",
                    owner=str(folder.path),
                    value=sorted(unknown)[:MAX_SHOWN],
                )
        self.sizes: dict[int, tuple[int, float]] = {}
        self.shapes = {path: self.weights[path].shape for path in self._parts}
        self._size({kind for folder in folders for kind in folder.kinds})

    def _size(self, kinds: Collection[str]) -> None:
        """Set the sizes of the adapters, and the shapes of their tensors of all kinds."""
        for path, indices in self._parts.items():
            for parts in indices.values() if path[-1] == "lora_b" else ():
                rank = sum(one.piece.shape[0] for one in parts)
                key, size = id(self.dots[path[:-1]]), (rank, parts[0].scale)
                self.sizes[key] = max(size, self.sizes.get(key, size))
        for dot, template in self.dots.items():
            axes = {"lora_a": -1, "lora_b": self._axes_of_inputs(dot).start}
            # Layers without an adapter have tensors too if others of their stack have one.
            for kind in kinds if id(template) in self.sizes else ():
                shape = list(self.weights[*dot, kind].shape)
                if kind in axes:
                    shape[axes[kind]] = self.sizes[id(template)][0]
                self.shapes[*dot, kind] = tuple(shape)

    def _place_modules(self, folder: AdapterFolder) -> list[str]:
        """Match the modules of a folder; return those without an adapter in the model."""
        dot_of = {weight_of((*dot, "lora_a")): dot for dot in self.dots}
        unknown = []
        for module in folder.modules:
            pieces = self._groups.get(module + WEIGHT, [])
            dots = [dot_of.get(piece.path, ()) for piece in pieces]
            paths = {(*dot, kind) for dot in dots for kind in folder.kinds}
            if not paths or not self.weights.keys() >= paths:
                unknown.append(module)
                continue
            rank = folder.rank(module)
            adapters = [
                adapter_pieces(piece, dot, len(self._axes_of_inputs(dot)), rank)
                for dot, piece in zip(dots, pieces, strict=True)
            ]
            for kind in folder.kinds:
                parts = [adapter[kind] for adapter in adapters]
                self._place(folder, folder.tensors[module, kind], parts, folder.scale(module))
        return unknown

    def _place(
        self, folder: AdapterFolder, name: str, pieces: Sequence[Piece], scale: float = 1.0
    ) -> None:
        for piece in folder.locate(name, pieces):
            parts = self._parts.setdefault(piece.path, {}).setdefault(piece.index, [])
            parts.append(_Part(folder, piece, scale))

    def _place_saved(self, folder: AdapterFolder) -> list[str]:
        """Match the saved tensors of a folder; return those that the model lacks."""
        saved, copies = folder.saved, tied_copies(self._family, self._groups)
        problems = [*(saved.keys() - self._groups.keys() - copies.keys())]
        for copy, original in copies.items():
            both = [saved[name] for name in (original, copy) if name in saved]
            is_tied = len(both) == 2 and same_tensor(folder.source, *both)
            if both and not is_tied and not (folder.ties_weights and original in saved):
                problems.append(f"{copy} apart from {original}, to which the model ties it")
        for name in saved.keys() & self._groups.keys():
            self._place(folder, saved[name], self._groups[name])
        needed = group_by_weight([piece for group in self._groups.values() for piece in group])
        partly = [
            p for p in self._parts if p in needed and self._parts[p].keys() != needed[p].keys()
        ]
        return [*problems, *(f"{'/'.join(path[1:])} in some layers only" for path in partly)]

    def _axes_of_inputs(self, dot: Path) -> range:
        """Return the axes of a weight that are contracted; those of layers and experts precede."""
        a, b = (*dot, "lora_a"), (*dot, "lora_b")
        a, b, w = (self.weights[path].shape for path in (a, b, weight_of(a)))
        return range(len(a) + len(b) - 2 - len(w), len(a) - 1)

    def read(self, path: Path) -> np.ndarray:
        """Return a value in float32, of the shape in `shapes`.

        `lora_magnitude` has the norms of columns, from which `relative` subtracts those of the
        model, and NaN where there is no adapter.

        Raises:
          TensorMismatchError: A tensor is not finite.
        """
        kind = path[-1]
        value = np.full(self.shapes[path], np.nan if kind == "lora_magnitude" else 0, np.float32)
        for index, parts in self._parts.get(path, {}).items():
            tensors = [one.folder.read(one.piece) for one in parts]
            if kind == "lora_b":
                scale = lora_scale(self.dots[path[:-1]])
                factors = (np.float32(one.folder.weight * one.scale / scale) for one in parts)
                tensors = [x * y for x, y in zip(tensors, factors, strict=True)]
            joined = np.concatenate(tensors, -1 if kind == "lora_a" else 0)
            value[index][tuple(map(slice, joined.shape))] = joined
        return value

    def relative(self, path: Path, values: Mapping[Path, Any]) -> Any:
        """Return one of the values, with norms relative to those of the weight; see `read`."""
        if path[-1] != "lora_magnitude":
            return values[path]
        norms = column_norms(values[weight_of(path)], tuple(self._axes_of_inputs(path[:-1])))
        return jnp.nan_to_num(values[path] - norms)


def weight_of(path: Path) -> Path:
    """Return the path of the weight to which a value of an adapter belongs."""
    return (*path[:-2], weight_of_dot(path[-2]))


def _module_names(family: Family) -> set[str]:
    return {row.name.rpartition(".")[0].rpartition(".")[2] for row in family.rows}


def model_pieces(
    config: Config, families: list[Family]
) -> tuple[Family, dict[Path, jax.ShapeDtypeStruct], dict[str, list[Piece]]]:
    """Return the family of a model with adapters, its weights by path, and its tensors by name.

    The family is the first of `families` that has the model.

    Raises:
      UnsupportedModelError: No family has the model.
    """
    floating = strip_weight_formats(config)
    family = describe(strip_lora(floating), families)[0]
    anatomy = dissect(build(floating), family.rows)
    return family, anatomy.weights, group_by_tensor(pieces_of(anatomy, family.rows))


def tied_copies(family: Family, groups: Mapping[str, list[Piece]]) -> dict[str, str]:
    """Return the tensors that the model ties to others: copy → original."""
    return {c: of for c, of in family.copies.items() if c not in groups and of in groups}


def adapter_pieces(piece: Piece, dot: Path, num_inputs: int, rank: int) -> dict[str, Piece]:
    """Return the pieces of the tensors of an adapter that belong to a piece of its weight.

    Args:
      piece: Piece of the weight, with axes (in, out).
      dot: Path of the variables of the adapter.
      num_inputs: Number of axes of the weight that are contracted.
      rank: Rank of the adapter.
    """
    ins, outs = piece.layout.ours[:num_inputs], piece.layout.ours[num_inputs:]
    in_sizes, out_sizes = piece.shape[:num_inputs], piece.shape[num_inputs:]
    by_names = {frozenset(group): group for group in piece.layout.theirs}
    their_ins, their_outs = by_names.get(frozenset(ins)), by_names.get(frozenset(outs))
    if their_ins is None or their_outs is None:
        expected = "a tensor with one axis of inputs and one of outputs"
        raise TensorMismatchError(field="adapter of", value=piece.name, expected=expected)
    # A joined tensor has one A, and concatenates outputs.
    alone = dataclasses.replace(piece, joined_axis=None, offset=0, repeats=1)
    joined = alone if piece.joined_axis is None else dataclasses.replace(piece, joined_axis=0)
    rows = {
        "lora_a": (alone, (*in_sizes, rank), Layout((("rank",), their_ins), (*ins, "rank"))),
        "lora_b": (joined, (rank, *out_sizes), Layout((their_outs, ("rank",)), ("rank", *outs))),
        "lora_magnitude": (joined, out_sizes, Layout((their_outs,), outs)),
    }
    return {
        kind: dataclasses.replace(like, path=(*dot, kind), shape=shape, layout=layout)
        for kind, (like, shape, layout) in rows.items()
    }


def add_adapters(config: Config, folders: Folders) -> Config:
    """Return a copy of a model's config with the adapters that folders describe.

    Args:
      config: Config of a model without adapters, such as one of `model_config`.
      folders: Weight of each folder of PEFT. The model gets the weighted sum of their adapters.

    Raises:
      FileNotFoundError: A file is missing.
      UnsupportedModelError: A folder has an unsupported option, or no family has the model.
      TensorMismatchError: A folder has tensors that the model lacks.
      ConfigError: The model has adapters already, or the folders cannot be added.
    """
    return _adapt(config, folders)[0]


def import_adapters(
    folders: Folders, config: Config, variables: Mapping[str, Any]
) -> tuple[Config, dict[str, Any]]:
    """Return a model with the weighted sum of the adapters of folders: `(config, variables)`.

    Args:
      folders: Weight of each folder of PEFT, such as `{"path/to/adapter": 1.0}`.
      config: Config of the model, as `import_model` returns it.
      variables: Variables of the model, `{'params': …}`; they are not changed.

    Raises:
      ConfigError: See `add_adapters`.
    """
    adapted, placed = _adapt(config, folders)
    made = dict(flatten_dict(variables))
    made |= {path: jnp.asarray(placed.read(path)) for path in placed.shapes}
    for path in placed.shapes:
        made[path] = placed.relative(path, made).astype(placed.weights[path].dtype)
    return adapted, unflatten_dict(made)


def _adapt(config: Config, folders: Folders) -> tuple[Config, PlacedAdapters]:
    """Return the config with adapters that fit the folders, and their places in it."""
    opened = open_folders(folders)
    adapted = add_lora(
        config,
        rank_stabilized=all(folder.rank_stabilized for folder in opened),
        has_magnitude=any(folder.has_magnitude for folder in opened),
        dropout_rate=max((folder.dropout_rate for folder in opened), default=0.0),
    )
    placed = PlacedAdapters(opened, adapted)
    for owner in walk_configs(adapted):
        dot: Any = owner.dot_tpl if "dot_tpl" in field_names(owner) else None
        if id(dot) in placed.sizes:
            rank, scale = placed.sizes[id(dot)]
            dot.set(rank=rank, alpha=1.0)
            dot.alpha = scale / lora_scale(dot)
        elif is_lora(dot):
            owner.dot_tpl = dot.dot_tpl
    return adapted, placed


def open_folders(folders: Folders) -> list[AdapterFolder]:
    """Read the configs and the names of the tensors of folders of PEFT.

    Raises:
      ConfigError: A folder has another kind of adapter, or an unsupported option.
    """
    return [AdapterFolder(path, weight=weight) for path, weight in folders.items()]
