"""Import of adapters from folders of PEFT, one or the weighted sum of several.

A template of a layer has one rank and one alpha, whereas modules of PEFT may have several. Smaller
ranks are filled with zeros, which have no gradients, and other factors go into B. A tensor that
joins several weights, such as `qkv_proj`, gives all of them its A and each its part of B.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from layerkit.base.base_layer import PARAMS
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
from layerkit.interop.peft.adapter_folder import AdapterFolder
from layerkit.layers.basic.dots import weight_of_dot
from layerkit.layers.quantization.lora import (
    add_lora,
    column_norms,
    is_lora,
    lora_dots,
    lora_scale,
    without_lora,
)
from layerkit.layers.quantization.stored_weights import without_weight_formats

WEIGHT = ".weight"
"""Suffix of the tensor of a module that has an adapter."""
Folders = Mapping[str, float]
# Largest number of parts of a folder that an error lists.
_MAX_SHOWN = 10


# Folder, module, and the piece of each of its tensors.
_Part: TypeAlias = tuple[AdapterFolder, str, dict[str, Piece]]


class PlacedAdapters:
    """Adapters of folders, matched with the weights of a model that has adapters.

    Attributes:
      dots: Config of each `LoraDot` by the path of its variables.
      ranks: Rank for each path that a folder adapts, which is one of a template.
    """

    def __init__(self, folders: Sequence[AdapterFolder], config: Config):
        """Match the modules of the folders; `config` is that of a `LanguageModel` or the like.

        Raises:
          UnsupportedModelError: No family has the model.
          TensorMismatchError: A folder has tensors that the model lacks.
          ConfigError: Folders cannot be added.
        """
        self._folders = folders
        self.dots = lora_dots(config)
        # Several families may have the model, such as Llama and Phi 3 with joined tensors.
        names = {module.rpartition(".")[2] for folder in folders for module in folder.ranks}
        families = sorted(FAMILIES, key=lambda family: len(names - _module_names(family)))
        self._family, self.weights, self._groups = model_pieces(config, families)
        self._parts: dict[Path, dict[Index, list[_Part]]] = {}
        self._saved: dict[Path, dict[Index, tuple[AdapterFolder, Piece]]] = {}
        for folder in folders:
            is_alone = len(folders) == 1 and folder.weight == 1.0
            needs_one = folder.has_magnitude or bool(folder.saved)
            expected = "one folder of weight 1, since norms (DoRA) and saved modules have no sum"
            require(is_alone or not needs_one, str(folder.path), "weight", folder.weight, expected)
            if unknown := self._place_modules(folder) + self._place_saved(folder):
                raise TensorMismatchError(
                    "the model cannot have these parts of the adapter",
                    owner=str(folder.path),
                    value=sorted(unknown)[:_MAX_SHOWN],
                )
        self.ranks = self._ranks()

    def _place_modules(self, folder: AdapterFolder) -> list[str]:
        """Match the modules of a folder; return those without an adapter in the model."""
        dot_of = {(*dot[:-1], weight_of_dot(dot[-1])): dot for dot in self.dots}
        unknown = []
        for module, rank in folder.ranks.items():
            pieces = self._groups.get(module + WEIGHT, [])
            if not pieces or not all(piece.path[1:] in dot_of for piece in pieces):
                unknown.append(module)
                continue
            dots = [dot_of[piece.path[1:]] for piece in pieces]
            located = {
                kind: folder.locate(
                    folder.tensors[module, kind],
                    [
                        adapter_piece(piece, kind, self._num_inputs(dot, piece.index), rank)
                        for piece, dot in zip(pieces, dots, strict=True)
                    ],
                )
                for kind in folder.kinds
            }
            for number, (piece, dot) in enumerate(zip(pieces, dots, strict=True)):
                part = {kind: several[number] for kind, several in located.items()}
                parts = self._parts.setdefault(dot, {})
                parts.setdefault(piece.index, []).append((folder, module, part))
        return unknown

    def _place_saved(self, folder: AdapterFolder) -> list[str]:
        """Match the saved tensors of a folder; return those that the model lacks."""
        unknown, problems = folder.saved.keys() - self._groups.keys(), []
        for copy, original in tied_copies(self._family, self._groups).items():
            both = [folder.saved[name] for name in (original, copy) if name in folder.saved]
            unknown -= {copy}
            is_tied = len(both) == 2 and same_tensor(folder.source, *both)
            if both and not is_tied and not (folder.ties_weights and original in folder.saved):
                problems.append(f"{copy} apart from {original}, to which the model ties it")
        for name in folder.saved.keys() & self._groups.keys():
            for piece in folder.locate(folder.saved[name], self._groups[name]):
                self._saved.setdefault(piece.path, {})[piece.index] = (folder, piece)
        needed = group_by_weight([piece for group in self._groups.values() for piece in group])
        partly = [p for p in self._saved if self._saved[p].keys() != needed[p].keys()]
        return [*unknown, *problems, *(f"{'/'.join(p[1:])} in some layers only" for p in partly)]

    def _ranks(self) -> dict[Path, int]:
        """Return the largest sum of ranks among the modules of each template, by path."""
        largest: dict[int, int] = {}
        for dot, parts in self._parts.items():
            for several in parts.values():
                rank = sum(folder.ranks[module] for folder, module, _ in several)
                key = id(self.dots[dot])
                largest[key] = max(rank, largest.get(key, 0))
        return {dot: largest[id(self.dots[dot])] for dot in self._parts}

    def modules(self) -> Iterator[tuple[Path, AdapterFolder, str]]:
        """Yield (path of the adapter, folder, module) for all modules."""
        for dot, parts in self._parts.items():
            for several in parts.values():
                for folder, module, _ in several:
                    yield dot, folder, module

    def shapes(self) -> dict[Path, tuple[int, ...]]:
        """Return the shape of each value that the folders have, by path with the collection."""
        shapes = {path: self.weights[path].shape for path in self._saved}
        for dot, rank in self.ranks.items():
            (*a, _), b = (self.weights[PARAMS, *dot, f"lora_{x}"].shape for x in "ab")
            axis = len(next(iter(self._parts[dot])))
            leading, outs = tuple(b[:axis]), tuple(b[axis + 1 :])
            shapes[PARAMS, *dot, "lora_a"] = (*a, rank)
            shapes[PARAMS, *dot, "lora_b"] = (*leading, rank, *outs)
            if any(folder.has_magnitude for folder in self._folders):
                shapes[PARAMS, *dot, "lora_magnitude"] = (*leading, *outs)
        return shapes

    def _num_inputs(self, dot: Path, index: Index) -> int:
        """Return the number of axes of the weight that are contracted."""
        return len(self.weights[PARAMS, *dot, "lora_a"].shape) - 1 - len(index)

    def read(self, path: Path) -> np.ndarray:
        """Return a value in float32, of the shape in `shapes`.

        `lora_magnitude` has the norms of columns, from which `relative` subtracts those of the
        model, and NaN where there is no adapter.

        Raises:
          TensorMismatchError: A tensor has another shape or is not finite.
        """
        dot, kind = path[1:-1], path[-1]
        fill = np.nan if kind == "lora_magnitude" else 0
        value = np.full(self.shapes()[path], fill, np.float32)
        for index, (saving, piece) in self._saved.get(path, {}).items():
            value[index] = saving.read(piece)
        for index, several in self._parts.get(dot, {}).items():
            start = 0
            for folder, module, pieces in several:
                part, rank = folder.read(pieces[kind]), folder.ranks[module]
                if kind == "lora_a":
                    value[index][..., start : start + rank] = part
                elif kind == "lora_b":
                    factor = folder.weight * folder.scale(module) / lora_scale(self.dots[dot])
                    value[index][start : start + rank] = part * np.float32(factor)
                else:
                    value[index] = part
                start += rank
        return value

    def relative(self, path: Path, magnitude: Any, w: Any) -> jax.Array:
        """Return the changes of the norms of columns of a weight `w`; see `read`."""
        index = next(iter(self._parts[path[1:-1]]))
        axes = range(len(index), len(index) + self._num_inputs(path[1:-1], index))
        norms = column_norms(w, tuple(axes))
        return jnp.nan_to_num(magnitude - norms)


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
    floating = without_weight_formats(config)
    family = describe(without_lora(floating), families)[0]
    anatomy = dissect(build(floating), family.rows)
    return family, anatomy.weights, group_by_tensor(pieces_of(anatomy, family.rows))


def tied_copies(family: Family, groups: Mapping[str, list[Piece]]) -> dict[str, str]:
    """Return the tensors that the model ties to others: copy → original."""
    return {c: of for c, of in family.copies.items() if c not in groups and of in groups}


def adapter_piece(piece: Piece, kind: str, num_inputs: int, rank: int) -> Piece:
    """Return the piece of an adapter's tensor that belongs to a piece of its weight.

    Args:
      piece: Piece of the weight, with axes (in, out).
      kind: `lora_a`, `lora_b` or `lora_magnitude`.
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
    layouts = {
        "lora_a": (Layout((("rank",), their_ins), (*ins, "rank")), (*in_sizes, rank)),
        "lora_b": (Layout((their_outs, ("rank",)), ("rank", *outs)), (rank, *out_sizes)),
        "lora_magnitude": (Layout((their_outs,), outs), out_sizes),
    }
    layout, shape = layouts[kind]
    # A joined tensor has one A, and concatenates outputs.
    is_joined = piece.joined_axis is not None and kind != "lora_a"
    offset, repeats = (piece.offset, piece.repeats) if is_joined else (0, 1)
    axis = 0 if is_joined else None
    return Piece(piece.name, piece.path, piece.index, shape, layout, axis, offset, repeats)


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
    opened = open_folders(folders)
    adapted = add_lora(config)
    placed = PlacedAdapters(opened, adapted)
    modules: dict[int, list[tuple[AdapterFolder, str]]] = {}
    for dot, folder, module in placed.modules():
        modules.setdefault(id(placed.dots[dot]), []).append((folder, module))
    for path, rank in placed.ranks.items():
        dot_tpl = placed.dots[path]
        folder, module = max(modules[id(dot_tpl)], key=lambda one: one[0].ranks[one[1]])
        is_alone = len(opened) == 1
        dot_tpl.set(
            rank=rank,
            alpha=float(folder.alpha(module) if is_alone else folder.scale(module) * rank),
            rank_stabilized=is_alone and folder.rank_stabilized,
            has_magnitude=folder.has_magnitude,
            dropout_rate=max(one.dropout_rate for one in opened),
        )
    for owner in walk_configs(adapted):
        inner = owner.dot_tpl if "dot_tpl" in field_names(owner) else None
        if inner is not None and is_lora(inner) and id(inner) not in modules:
            owner.dot_tpl = inner.dot_tpl
    return adapted


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
    adapted = add_adapters(config, folders)
    placed = PlacedAdapters(open_folders(folders), adapted)
    made, shapes = dict(flatten_dict(variables)), placed.shapes()
    for path, like in placed.weights.items():
        if path in shapes:
            value: Any = placed.read(path)
            if path[-1] == "lora_magnitude":
                value = placed.relative(path, value, made[weight_of(path)])
            made[path] = jnp.asarray(value, like.dtype)
        elif path not in made and path[1:-1] in placed.dots:
            made[path] = jnp.zeros(like.shape, like.dtype)
    return adapted, unflatten_dict(made)


def open_folders(folders: Folders) -> list[AdapterFolder]:
    """Read the configs and the names of the tensors of folders of PEFT.

    Raises:
      ConfigError: A folder has another kind of adapter, or an unsupported option.
    """
    return [AdapterFolder(path, weight=weight) for path, weight in folders.items()]
