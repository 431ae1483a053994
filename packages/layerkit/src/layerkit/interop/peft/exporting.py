"""Export of a model's adapters to a folder of PEFT, which PEFT and vLLM load beside the model.

Adapters of weights that one tensor joins, such as `qkv_proj`, become one adapter whose rank is the
sum of theirs, with zeros outside of the blocks of B; or keep theirs if they have the same A.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path as File
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict

from layerkit.config import Config, target_of
from layerkit.config.checks import require
from layerkit.errors import ConfigError
from layerkit.interop.hugging_face.exporting import (
    candidate_families,
    gather_part,
    gather_tensor,
    language_model,
    replace_file,
)
from layerkit.interop.hugging_face.folder import write_json
from layerkit.interop.hugging_face.tensors import Path, Piece, join_parts
from layerkit.interop.peft.adapter_folder import ADAPTER_CONFIG, ADAPTER_WEIGHTS, PREFIX, SUFFIXES
from layerkit.interop.peft.importing import (
    WEIGHT,
    adapter_pieces,
    model_pieces,
    tied_copies,
    weight_of,
)
from layerkit.layers.quantization.lora import column_norms, lora_dots, lora_scale
from layerkit.layers.quantization.stored_weights import dequantize_model
from layerkit.models.language_model import LanguageModel

_Part: TypeAlias = dict[str, tuple[Piece, np.ndarray]]


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
    dot_of = {weight_of((*dot, "lora_a")): dot for dot in dots}
    tensors: dict[str, np.ndarray] = {}
    sizes: dict[str, tuple[int, float]] = {}  # rank and factor of each module
    for name, pieces in groups.items():
        paths = [dot_of[piece.path] for piece in pieces if piece.path in dot_of]
        is_module = name.endswith(WEIGHT) and ".experts." not in name and name not in saved
        if paths and (len(paths) < len(pieces) or not is_module):
            raise ConfigError(
                "PEFT cannot have the adapter",
                field="adapter of",
                value=name,
                expected="a module with one matrix, all of which is adapted and which is not saved",
                hint="Export the model with merged adapters instead.",
            )
        parts = [_part_of_adapter(*one, leaves) for one in zip(pieces, paths, strict=False)]
        if any(part["lora_a"][1].size for part in parts):
            module, scales = name.removesuffix(WEIGHT), [lora_scale(dots[dot]) for dot in paths]
            adapter = _join(parts, scales)
            sizes[module] = len(adapter["lora_a"]), max(scales)
            tensors |= {f"{PREFIX}{module}{SUFFIXES[kind]}": x for kind, x in adapter.items()}
    require(bool(sizes), "LoraDot", "lora_a and lora_b", 0, "an adapter that is not 0 everywhere")
    for name, original in saved.items():
        tensors[PREFIX + name] = gather_tensor(groups[original], leaves)
    if jax.process_index() != 0:
        return
    first = next(iter(dots.values()))
    layout = groups[next(iter(sizes)) + WEIGHT][0].layout
    content = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if issubclass(target_of(model), LanguageModel) else None,
        "base_model_name_or_path": None if base_folder is None else str(base_folder),
        "bias": "none",
        "fan_in_fan_out": layout.ours[0] in layout.theirs[0],
        "inference_mode": True,
        "lora_dropout": first.dropout_rate,
        "target_modules": sorted(sizes),
        "modules_to_save": sorted({_module_of(name) for name in saved}) or None,
        "use_dora": first.has_magnitude,
        **_ranks(sizes, rank_stabilized=all(dot.rank_stabilized for dot in dots.values())),
    }
    File(folder).mkdir(parents=True, exist_ok=True)
    # It is written last, since a folder without it is no adapter.
    (File(folder) / ADAPTER_CONFIG).unlink(missing_ok=True)
    contiguous = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    replace_file(File(folder) / ADAPTER_WEIGHTS, contiguous)
    write_json(File(folder), ADAPTER_CONFIG, content)


def _saved_names(
    patterns: Sequence[str], groups: Mapping[str, list[Piece]], copies: Mapping[str, str]
) -> dict[str, str]:
    """Return the tensors to save: name → tensor of the model that has its values."""
    modules: set[str] = set()
    for pattern in patterns:
        matched = {
            _module_of(name)
            for name, pieces in groups.items()
            if any(re.fullmatch(pattern, "/".join(piece.path[1:])) for piece in pieces)
        }
        expected = "the path of a weight of the model"
        require(bool(matched), "export_adapters", "modules_to_save", pattern, expected)
        modules |= matched
    whole = {name: name for name in groups if _module_of(name) in modules}
    return whole | {copy: original for copy, original in copies.items() if original in whole}


def _part_of_adapter(
    piece: Piece, path: Path, leaves: Mapping[Path, Any]
) -> dict[str, tuple[Piece, np.ndarray]]:
    """Return the tensors of the adapter of one piece, without ranks of zeros, and their pieces."""
    values = {
        kind: gather_part(leaves[*path, kind], piece.index)
        for kind in SUFFIXES
        if (*path, kind) in leaves
    }
    a, b = values["lora_a"], values["lora_b"]
    is_used = a.reshape(-1, a.shape[-1]).any(0) | b.reshape(len(b), -1).any(1)
    rank = int(np.max(np.flatnonzero(is_used), initial=-1)) + 1
    values |= {"lora_a": a[..., :rank], "lora_b": b[:rank]}
    if "lora_magnitude" in values:
        w = jnp.asarray(gather_part(leaves[piece.path], piece.index))
        norms = np.asarray(column_norms(w, tuple(range(a.ndim - 1))))
        values["lora_magnitude"] = norms + values["lora_magnitude"].astype(norms.dtype)
    pieces = adapter_pieces(piece, path, a.ndim - 1, rank)
    return {kind: (pieces[kind], pieces[kind].layout.to_theirs(x)) for kind, x in values.items()}


def _join(parts: Sequence[_Part], scales: Sequence[float]) -> dict[str, np.ndarray]:
    """Return the adapter of a tensor that joins several weights, or one, for the largest factor."""
    several = {kind: [part[kind][1] for part in parts] for kind in parts[0]}
    a, factor = several["lora_a"], max(scales)
    scaled = zip(several["lora_b"], scales, strict=True)
    several["lora_b"] = [x * x.dtype.type(scale / factor) for x, scale in scaled]
    if not all(np.array_equal(one, a[0]) for one in a):
        stops = np.cumsum([len(one) for one in a])
        blocks = zip(several["lora_b"], stops, strict=True)
        several["lora_b"] = [
            np.pad(x, ((0, 0), (stop - x.shape[1], stops[-1] - stop))) for x, stop in blocks
        ]
        several["lora_a"] = [np.concatenate(a)]
    return {
        kind: join_parts([part[kind][0] for part in parts], tensors)
        for kind, tensors in several.items()
    }


def _ranks(sizes: Mapping[str, tuple[int, float]], *, rank_stabilized: bool) -> dict[str, Any]:
    """Return the keys of ranks and strengths: one of each, and patterns of those that differ."""

    def alpha(rank: int, factor: float) -> float:
        value = float(f"{factor * (math.sqrt(rank) if rank_stabilized else rank):.12g}")
        return int(value) if value.is_integer() else value

    largest = max(sizes, key=lambda module: sizes[module][0])
    ranks = {module: rank for module, (rank, _) in sizes.items()}
    alphas = {module: alpha(*size) for module, size in sizes.items()}
    return {
        "r": ranks[largest],
        "lora_alpha": alphas[largest],
        "use_rslora": rank_stabilized,
        "rank_pattern": {m: x for m, x in ranks.items() if x != ranks[largest]},
        "alpha_pattern": {m: x for m, x in alphas.items() if x != alphas[largest]},
    }


def _module_of(tensor: str) -> str:
    return tensor.rpartition(".")[0]
