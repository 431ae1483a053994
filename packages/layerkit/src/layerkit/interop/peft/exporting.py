"""Export of a model's adapters to a folder of PEFT, which PEFT and vLLM load beside the model.

Adapters of weights that one tensor joins, such as `qkv_proj`, become one adapter whose rank is the
sum of theirs, with zeros outside of the blocks of B; or keep theirs if they have the same A.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path as File
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict

from layerkit.base.base_layer import PARAMS
from layerkit.config import Config, target_of
from layerkit.config.checks import require
from layerkit.errors import ConfigError
from layerkit.interop.hugging_face.exporting import (
    candidate_families,
    gather_part,
    language_model,
    replace_file,
)
from layerkit.interop.hugging_face.folder import write_json
from layerkit.interop.hugging_face.tensors import Path, Piece, join_parts
from layerkit.interop.peft.adapter_folder import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    PREFIX,
)
from layerkit.interop.peft.importing import (
    WEIGHT,
    adapter_piece,
    model_pieces,
    tied_copies,
)
from layerkit.layers.basic.dots import weight_of_dot
from layerkit.layers.quantization.lora import column_norms, lora_dots, lora_scale
from layerkit.layers.quantization.stored_weights import dequantize_model
from layerkit.models.language_model import LanguageModel

# Names of the tensors of a module's adapter.
_NAMES = {
    "lora_a": "lora_A.weight",
    "lora_b": "lora_B.weight",
    "lora_magnitude": "lora_magnitude_vector",
}


def export_adapters(
    folder: str | os.PathLike[str],
    model: Config,
    variables: Mapping[str, Any],
    *,
    base_folder: str | os.PathLike[str] | None = None,
    modules_to_save: Sequence[str] = (),
) -> None:
    """Write the adapters of a model as a folder of PEFT.

    If there are several processes, all of them must call this function; the first one writes.

    Args:
      folder: Folder to write; files of the same names are replaced.
      model: Config of a model with adapters.
      variables: Variables of the model, `{'params': …}`.
      base_folder: Folder of the model without adapters, which adapter_config.json names. Its family
        decides the names of modules; None for the first family that has the model.
      modules_to_save: Regular expressions of paths of other weights that were trained, such as
        `lm/softmax/w`. Their modules are written whole.

    Raises:
      FileExistsError: `folder` has a model.
      UnsupportedModelError: No family has the model.
      ConfigError: The model has no adapters, or PEFT cannot have them.
    """
    if (File(folder) / "config.json").is_file():
        raise FileExistsError(f"folder={str(folder)!r} has a model. Expected another folder.")
    model, variables = language_model(model, variables)
    dots = lora_dots(model)
    kinds = {dot.has_magnitude for dot in dots.values()}
    expected = "one value in all adapters, since PEFT has one use_dora"
    require(len(kinds) == 1, "LoraDot", "has_magnitude", sorted(kinds), expected)
    if True in kinds:
        model, variables = dequantize_model(model, variables)  # to read the norms of weights
    family, _, groups = model_pieces(model, candidate_families(None, base_folder))
    leaves = flatten_dict(variables)
    saved = _saved_names(modules_to_save, groups, tied_copies(family, groups))
    adapters, factors = _adapters(groups, dots, leaves, saved)
    tensors = {
        f"{PREFIX}{module}.{_NAMES[kind]}": np.ascontiguousarray(tensor)
        for module, adapter in adapters.items()
        for kind, tensor in adapter.items()
    }
    for name, original in saved.items():
        parts = [
            piece.layout.to_theirs(gather_part(leaves[piece.path], piece.index))
            for piece in groups[original]
        ]
        tensors[PREFIX + name] = np.ascontiguousarray(join_parts(groups[original], parts))
    if jax.process_index() != 0:
        return
    first = next(iter(dots.values()))
    layout = groups[next(iter(adapters)) + WEIGHT][0].layout
    ranks = {module: len(adapter["lora_a"]) for module, adapter in adapters.items()}
    content = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if issubclass(target_of(model), LanguageModel) else None,
        "base_model_name_or_path": None if base_folder is None else str(base_folder),
        "bias": "none",
        "fan_in_fan_out": layout.ours[0] in layout.theirs[0],
        "inference_mode": True,
        "lora_dropout": first.dropout_rate,
        "target_modules": _short_names(adapters, groups),
        "modules_to_save": _short_names(map(_module_of, saved), groups) or None,
        "use_dora": first.has_magnitude,
        **_ranks(ranks, factors, rank_stabilized=all(d.rank_stabilized for d in dots.values())),
    }
    File(folder).mkdir(parents=True, exist_ok=True)
    # It is written last, since a folder without it is no adapter.
    (File(folder) / ADAPTER_CONFIG).unlink(missing_ok=True)
    replace_file(File(folder) / ADAPTER_WEIGHTS, tensors)
    write_json(File(folder), ADAPTER_CONFIG, content)


def _adapters(
    groups: Mapping[str, list[Piece]],
    dots: Mapping[Path, Config],
    leaves: Mapping[Path, Any],
    saved: Collection[str],
) -> tuple[dict[str, dict[str, np.ndarray]], dict[str, float]]:
    """Return the tensors of the adapter of each module, and its factor.

    Raises:
      ConfigError: PEFT cannot have an adapter.
    """
    dot_of = {(PARAMS, *dot[:-1], weight_of_dot(dot[-1])): dot for dot in dots}
    adapters: dict[str, dict[str, np.ndarray]] = {}
    factors: dict[str, float] = {}
    for name, pieces in groups.items():
        adapted = [piece for piece in pieces if piece.path in dot_of]
        is_module = name.endswith(WEIGHT) and ".experts." not in name and name not in saved
        if adapted and (len(adapted) < len(pieces) or not is_module):
            raise ConfigError(
                "PEFT cannot have the adapter",
                field="adapter of",
                value=name,
                expected="a module with one matrix, all of which is adapted and which is not saved",
                hint="Export the model with merged adapters instead.",
            )
        own = [dot_of[piece.path] for piece in adapted]
        both = [_part_of_adapter(*one, leaves) for one in zip(adapted, own, strict=True)]
        if any(part["lora_a"].size for part, _ in both):
            module, scales = name.removesuffix(WEIGHT), [lora_scale(dots[dot]) for dot in own]
            adapters[module], factors[module] = _join(both, scales)
    return adapters, factors


def _saved_names(
    patterns: Sequence[str], groups: Mapping[str, list[Piece]], copies: Mapping[str, str]
) -> dict[str, str]:
    """Return the tensors to save: name → tensor of the model that has its values."""
    names: set[str] = set()
    for pattern in patterns:
        matched = {
            name
            for name, pieces in groups.items()
            if any(re.fullmatch(pattern, "/".join(piece.path[1:])) for piece in pieces)
        }
        expected = "the path of a weight of the model"
        require(bool(matched), "export_adapters", "modules_to_save", pattern, expected)
        names |= matched
    modules = {_module_of(name) for name in names}
    whole = [name for name in groups if _module_of(name) in modules]
    tied = {copy: original for copy, original in copies.items() if original in whole}
    return {name: name for name in whole} | tied


def _part_of_adapter(
    piece: Piece, dot: Path, leaves: Mapping[Path, Any]
) -> tuple[dict[str, np.ndarray], dict[str, Piece]]:
    """Return the tensors of the adapter of one piece, without ranks of zeros, and their pieces."""
    values = {
        kind: gather_part(leaves[PARAMS, *dot, kind], piece.index)
        for kind in _NAMES
        if (PARAMS, *dot, kind) in leaves
    }
    a, b = values["lora_a"], values["lora_b"]
    is_used = a.reshape(-1, a.shape[-1]).any(0) | b.reshape(len(b), -1).any(1)
    rank = int(np.max(np.flatnonzero(is_used), initial=-1)) + 1
    values |= {"lora_a": a[..., :rank], "lora_b": b[:rank]}
    if "lora_magnitude" in values:
        w = jnp.asarray(gather_part(leaves[piece.path], piece.index))
        norms = np.asarray(column_norms(w, tuple(range(a.ndim - 1))))
        values["lora_magnitude"] = norms + values["lora_magnitude"].astype(norms.dtype)
    pieces = {kind: adapter_piece(piece, kind, a.ndim - 1, rank) for kind in values}
    return {kind: pieces[kind].layout.to_theirs(x) for kind, x in values.items()}, pieces


def _join(
    parts: Sequence[tuple[dict[str, np.ndarray], dict[str, Piece]]], factors: Sequence[float]
) -> tuple[dict[str, np.ndarray], float]:
    """Return the adapter of a tensor that joins several weights, or one, and its factor."""
    several = {kind: [tensors[kind] for tensors, _ in parts] for kind in parts[0][0]}
    a, b, factor = several["lora_a"], several["lora_b"], max(factors)
    if len(set(factors)) > 1 or not all(np.array_equal(one, a[0]) for one in a):
        stops = np.cumsum([len(one) for one in a])
        blocks = [np.zeros((len(one), stops[-1]), one.dtype) for one in b]
        for block, one, stop, own in zip(blocks, b, stops, factors, strict=True):
            block[:, stop - one.shape[1] : stop] = one * one.dtype.type(own / factor)
        several |= {"lora_a": [np.concatenate(a)], "lora_b": blocks}
    joined = {
        kind: join_parts([pieces[kind] for _, pieces in parts], tensors)
        for kind, tensors in several.items()
    }
    return joined, factor


def _ranks(
    ranks: Mapping[str, int], factors: Mapping[str, float], *, rank_stabilized: bool
) -> dict[str, Any]:
    """Return the keys of ranks and strengths: one of each, and patterns of those that differ."""

    def alpha(module: str) -> float:
        divisor = math.sqrt(ranks[module]) if rank_stabilized else ranks[module]
        value = float(f"{factors[module] * divisor:.12g}")
        return int(value) if value.is_integer() else value

    largest = max(ranks, key=lambda module: ranks[module])
    defaults = {"r": ranks[largest], "lora_alpha": alpha(largest)}
    alphas = {module: alpha(module) for module in ranks}
    return {
        **defaults,
        "use_rslora": rank_stabilized,
        "rank_pattern": _patterns(ranks, defaults["r"]),
        "alpha_pattern": _patterns(alphas, defaults["lora_alpha"]),
    }


def _patterns(values: Mapping[str, float], default: float) -> dict[str, float]:
    """Return the values that are not the default, by the last name of modules or by the whole."""
    by_name: dict[str, set[float]] = {}
    for module, value in values.items():
        by_name.setdefault(module.rpartition(".")[2], set()).add(value)
    patterns: dict[str, float] = {}
    for module, value in values.items():
        name = module.rpartition(".")[2]
        if value != default or len(by_name[name]) > 1:
            patterns[name if len(by_name[name]) == 1 else module] = value
    return patterns


def _short_names(modules: Iterable[str], groups: Mapping[str, list[Piece]]) -> list[str]:
    """Return the ends of names that match these modules alone; PEFT compares ends of names."""
    chosen, present = set(modules), {_module_of(name) for name in groups} | set(modules)
    names = set()
    for module in chosen:
        name = module.rpartition(".")[2]
        alike = {one for one in present if one.endswith(name)}
        names.add(name if alike <= chosen else module)
    return sorted(names)


def _module_of(tensor: str) -> str:
    return tensor.rpartition(".")[0]
