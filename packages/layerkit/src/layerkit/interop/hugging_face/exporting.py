"""Export of a model to a folder that Transformers and compatible libraries load."""

from __future__ import annotations

import functools
import math
import os
import pathlib
import re
import secrets
import stat
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict
from jax.sharding import NamedSharding, PartitionSpec

from layerkit.base.base_layer import PARAMS
from layerkit.config import Config, build, field_names, is_config, target_of
from layerkit.interop.hugging_face.families import FAMILIES, family_of
from layerkit.interop.hugging_face.family import Family
from layerkit.interop.hugging_face.folder import (
    CONFIG,
    INDEX,
    WEIGHTS,
    copy_companions,
    import_safetensors,
    read_json,
    write_json,
)
from layerkit.interop.hugging_face.generation import export_defaults
from layerkit.interop.hugging_face.importing import TensorMismatchError
from layerkit.interop.hugging_face.keys import UnsupportedModelError
from layerkit.interop.hugging_face.layouts import LINEAR
from layerkit.interop.hugging_face.tensors import (
    Index,
    Path,
    Piece,
    Row,
    dissect,
    group_by_tensor,
    group_by_weight,
    join_parts,
    pieces_of,
    their_shapes,
)
from layerkit.layers.quantization.current_scaling import Fp8CurrentDot, Int8Dot
from layerkit.layers.quantization.fp8 import Fp8Dot
from layerkit.layers.quantization.lora import remove_lora
from layerkit.layers.quantization.mxfp8 import MxFp8Dot
from layerkit.layers.quantization.nvfp4 import NvFp4Dot
from layerkit.layers.quantization.stored_weights import dequantize_model
from layerkit.models.bert import BertModel
from layerkit.models.distillation_model import DistillationModel
from layerkit.models.language_model import LanguageModel
from layerkit.models.preference_model import PolicyModel, RewardModel
from layerkit.models.transformer_lm import TransformerLm

# Fields that change how a model is computed, trained or sharded, but not its outputs.
# fmt: off
_NO_EFFECT = frozenset({
    "activation_axes", "augmenter_tpl", "axes", "backend", "balance_all_choices", "bias_axes",
    "cache_format", "capacity_factor", "chunk_size", "circular_repeats", "context_parallel",
    "decoder", "down_init", "dropout_rate", "droppath_rate", "dtype", "embedding_axes",
    "exchange_buffer_factor", "expert_exchange", "fprop_dtype", "gather_weights_once",
    "grouped_matmul", "initial_rates", "initial_scale", "initial_steps", "jitter", "kernel_blocks",
    "label_smoothing", "load_balance_weight", "loss_weight", "max_scale", "microbatch_size",
    "num_groups", "num_microbatches", "num_stages", "output_dropout_rate", "params_init",
    "prompt_ids", "remat",
    "router_z_weight", "score_bias_rate", "sharding", "stacked_shape", "stage_remat",
    "stream_inputs", "tokens_per_chunk", "train", "unmasked_ids", "unroll", "weight_axes",
    "weight_init", "z_loss_weight",
})
# fmt: on
# Products that round their factors. The weights themselves are not rounded.
_ROUNDING_DOTS = (Fp8Dot, Fp8CurrentDot, Int8Dot, MxFp8Dot, NvFp4Dot)
# Largest number of differences that an error lists.
_MAX_SHOWN = 4
# In Transformers a reward model is a classifier, with a head in place of that of the next token.
_CAUSAL = re.compile("ForCausalLM$|LMHeadModel$")
_SCORE = Row("score.weight", "score/w", LINEAR)
# Keys of config.json without a field in our configs, which are copied.
_CARRIED = ("bos_token_id", "eos_token_id", "pad_token_id")


def export_model(
    folder: str | os.PathLike[str],
    model: Config,
    variables: Mapping[str, Any],
    *,
    family: str | None = None,
    tokenizer_folder: str | os.PathLike[str] | None = None,
    max_shard_bytes: int = 5 * 10**9,
) -> None:
    """Write a model as a Hugging Face folder.

    The exported model is the deployed one: the policy of a `PolicyModel`, the student of a
    `DistillationModel`, and weights with LoRA adapters merged. A `RewardModel` becomes a classifier
    of sequences with one label. If there are several processes, all of them must call this
    function; the first one writes.

    Args:
      folder: Folder to write. Files of the same names, and all tensors in the folder, are replaced.
      model: Config of the model, as `import_model` returns it or made by hand.
      variables: Weights of the model, `{'params': …}`, each written in its dtype.
      family: `model_type` to write; None for that of `tokenizer_folder` if it can represent the
        model, and otherwise the first that can.
      tokenizer_folder: Folder whose tokenizer, generation defaults and special token ids are
        copied.
      max_shard_bytes: Largest size of a file of tensors in bytes.

    Raises:
      FileExistsError: `folder` is `tokenizer_folder`.
      UnsupportedModelError: No family computes what the model computes.
      ConfigError: The LoRA adapters cannot be merged.
      TensorMismatchError: The variables are not those of the model.
    """
    source = tokenizer_folder and os.path.realpath(tokenizer_folder)
    if source == os.path.realpath(folder):
        raise FileExistsError(
            f"folder={str(folder)!r} is tokenizer_folder, whose model would be lost. Expected"
            " another folder."
        )
    model, variables = deployed_model(model, variables)
    is_reward = issubclass(target_of(model), RewardModel)
    network = language_model(model.lm_tpl, {})[0] if is_reward else model
    chosen, content = describe(network, candidate_families(family, tokenizer_folder))
    rows = chosen.rows
    if is_reward:
        rows = (*(row for row in rows if not _is_untied_head(row)), _SCORE)
        content["architectures"] = [_CAUSAL.sub("ForSequenceClassification", chosen.architecture)]
        content |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    pieces = pieces_of(dissect(build(model), rows), rows)
    needed, flat = set(group_by_weight(pieces)), flatten_dict(variables)
    kept = needed if is_reward else {path for path in flat if path[0] == PARAMS} | needed
    leaves = {path: leaf for path, leaf in flat.items() if path in kept}
    _check_weights(set(leaves), needed)
    path = pathlib.Path(folder)
    writes = jax.process_index() == 0
    if writes:
        path.mkdir(parents=True, exist_ok=True)
        if tokenizer_folder is not None:
            copy_companions(tokenizer_folder, path)
            export_defaults(tokenizer_folder, path)
            # What describes the model takes precedence.
            content = _carried_over(tokenizer_folder, chosen) | content
        content |= _token_ids(chosen, content)
        # The old key, which all versions of Transformers read.
        dtypes = (leaf.dtype for path, leaf in leaves.items() if path[0] == PARAMS)
        content["torch_dtype"] = str(next(dtypes))
        # It is written last, since a folder without it is no model.
        (path / CONFIG).unlink(missing_ok=True)
    _write_tensors(path, pieces, leaves, max_shard_bytes=max_shard_bytes, writes=writes)
    if writes:
        write_json(path, CONFIG, content)


def _is_untied_head(row: Row) -> bool:
    return row.path == "lm/softmax/w" and row.beside is not None


def candidate_families(
    family: str | None, tokenizer_folder: str | os.PathLike[str] | None
) -> list[Family]:
    """Return the families to try, in order."""
    if family is not None:
        return [family_of(family)]
    if tokenizer_folder is None:
        return list(FAMILIES)
    preferred = read_json(tokenizer_folder).get("model_type")
    return sorted(FAMILIES, key=lambda candidate: candidate.model_type != preferred)


def describe(model: Config, candidates: list[Family]) -> tuple[Family, dict[str, Any]]:
    """Return the first family that can hold the model, and its config.json.

    Raises:
      UnsupportedModelError: No family can; the error lists the differences to the nearest.
    """
    refusals = []
    for candidate in candidates:
        try:
            content = candidate.write_config(model)
            differences = _differences(model, candidate.read_config(content))
            is_whole = True
        except (UnsupportedModelError, AttributeError, TypeError) as error:
            # The number of further differences is unknown.
            differences, is_whole = [str(error)], False
        if not differences:
            return candidate, content
        refusals.append((not is_whole, len(differences), candidate.model_type, differences))
    *_, nearest, differences = min(refusals, key=lambda refusal: refusal[:2])
    shown = "; ".join(differences[:_MAX_SHOWN])
    more = len(differences) - _MAX_SHOWN
    raise UnsupportedModelError(
        "no family of Hugging Face models computes the same",
        field="nearest family",
        value=nearest,
        hint=f"Differences: {shown}{f'; and {more} more' if more > 0 else ''}",
    )


def _differences(model: Config, read_back: Config) -> list[str]:
    """Return the differences in computation between a model and the model that is read back."""
    ours, theirs = dict(_facts(model)), dict(_facts(read_back))
    return [
        f"{path}={ours.get(path)!r}, which would be read as {theirs.get(path)!r}"
        for path in sorted(ours | theirs)
        if ours.get(path) != theirs.get(path)
    ]


def _facts(config: Config, path: str = "") -> Any:
    """Yield (path, value) of each field that changes what is computed."""
    for name in field_names(config):
        if name in _NO_EFFECT or name == "shared_weight_id":
            continue
        value, where = getattr(config, name), f"{path}{name}"
        if name == "dot_tpl" and is_config(value) and target_of(value) in _ROUNDING_DOTS:
            value = None
        if name == "num_kv_heads" and value is None:
            value = config.num_heads
        if name == "dim_per_head" and value is None and not path.count("layer"):
            value = _head_dim(config)
        if is_config(value):
            if not name.endswith("stack_tpl"):
                yield where, target_of(value).__qualname__
            yield from _facts(value, f"{where}.")
        elif isinstance(value, (tuple, list)) and any(is_config(item) for item in value):
            for number, item in enumerate(value):
                yield f"{where}[{number}]", target_of(item).__qualname__
                yield from _facts(item, f"{where}[{number}].")
        else:
            yield where, value


def _head_dim(config: Any) -> int | None:
    dims = getattr(config, "model_dims", None) if "model_dims" in field_names(config) else None
    return dims // config.num_heads if dims and config.num_heads else None


def _check_weights(present: set[Path], needed: set[Path]) -> None:
    missing = ["/".join(path) for path in sorted(needed - present)]
    surplus = ["/".join(path) for path in sorted(present - needed)]
    if missing or surplus:
        raise TensorMismatchError(
            "weights do not match the model",
            owner="variables",
            field="(missing, unexpected)",
            value=(missing, surplus),
        )


def _carried_over(source: str | os.PathLike[str], family: Family) -> dict[str, Any]:
    content = read_json(source)
    keys = set(_CARRIED)
    if content.get("model_type") == family.model_type:
        keys |= family.neutral & set(content)
    return {key: content[key] for key in keys if key in content}


def _token_ids(family: Family, content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the special tokens, without those that the vocabulary lacks.

    Transformers cannot load a model whose pad id is beyond its vocabulary.
    """
    stated = dict(family.token_ids) | {key: content[key] for key in _CARRIED if key in content}
    kept: dict[str, Any] = {}
    size = content.get("text_config", content).get("vocab_size", 0)
    for key, value in stated.items():
        several = value if isinstance(value, list) else [value]
        inside = [one for one in several if one is not None and 0 <= one < size]
        kept[key] = (inside if isinstance(value, list) else inside[0]) if inside else None
    return kept


def _write_tensors(
    folder: pathlib.Path,
    pieces: list[Piece],
    leaves: Mapping[Path, Any],
    *,
    max_shard_bytes: int,
    writes: bool,
) -> None:
    """Write tensors into files, of which one is held at a time, and remove older tensors.

    All processes gather the shards of each tensor; the one that `writes` keeps them.
    """
    shapes, groups = their_shapes(pieces), group_by_tensor(pieces)
    sizes = {
        name: math.prod(shape) * leaves[groups[name][0].path].dtype.itemsize
        for name, shape in shapes.items()
    }
    shards: list[list[str]] = [[]]
    left = max_shard_bytes
    for name, size in sizes.items():
        if shards[-1] and size > left:
            shards.append([])
            left = max_shard_bytes
        shards[-1].append(name)
        left -= size
    count = len(shards)
    files = [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
    files = [WEIGHTS] if count == 1 else files
    for file, names in zip(files, shards, strict=True):
        held: dict[str, np.ndarray] = {}
        for name in names:
            tensor = gather_tensor(groups[name], leaves)
            if writes:
                held[name] = tensor
        if writes:
            replace_file(folder / file, held)
    if not writes:
        return
    # A single file next to an older index would be two models, of which readers load one.
    (folder / INDEX).unlink(missing_ok=True)
    for stale in (*folder.glob("model-?????-of-?????.safetensors"), folder / WEIGHTS):
        if stale.name not in files:
            stale.unlink(missing_ok=True)
    if count > 1:
        file_of = {n: file for file, names in zip(files, shards, strict=True) for n in names}
        metadata = {"total_size": sum(sizes.values())}
        write_json(folder, INDEX, {"metadata": metadata, "weight_map": file_of})


def replace_file(path: pathlib.Path, tensors: dict[str, np.ndarray]) -> None:
    """Replace a safetensors file by an atomic write, with permissions by the umask.

    safetensors creates files that only their owner can read.
    """
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
    try:
        partial.touch(exist_ok=False)
        permissions = stat.S_IMODE(partial.stat().st_mode)
        # Transformers requires the metadata entry `format`.
        import_safetensors().numpy.save_file(tensors, partial, metadata={"format": "pt"})
        partial.chmod(permissions)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def gather_tensor(pieces: Sequence[Piece], leaves: Mapping[Path, Any]) -> np.ndarray:
    """Return a tensor in the memory of this host, from the pieces of weights that it has."""
    ours = [gather_part(leaves[piece.path], piece.index) for piece in pieces]
    parts = [piece.layout.to_theirs(part) for piece, part in zip(pieces, ours, strict=True)]
    return np.asarray(join_parts(pieces, parts), order="C")


def gather_part(leaf: Any, index: Index) -> np.ndarray:
    """Return a part of a weight in the memory of this host, gathered from its shards."""
    if isinstance(leaf, np.ndarray) or _is_on_hosts_cpu(leaf):
        return np.asarray(leaf)[index]
    whole = None
    if isinstance(leaf.sharding, NamedSharding):
        whole = NamedSharding(leaf.sharding.mesh, PartitionSpec())
    return np.asarray(_take(whole)(leaf, *index))


def _is_on_hosts_cpu(leaf: jax.Array) -> bool:
    return leaf.is_fully_addressable and all(d.platform == "cpu" for d in leaf.devices())


@functools.lru_cache(maxsize=8)
def _take(sharding: NamedSharding | None) -> Any:
    # The index is an argument, so that all layers share one compiled program.
    return jax.jit(lambda leaf, *index: leaf[index], out_shardings=sharding)


def deployed_model(model: Config, variables: Mapping[str, Any]) -> tuple[Config, Mapping[str, Any]]:
    """Return the model that others load, and its weights.

    It is that of `language_model`, with weights in floats and with LoRA adapters merged.

    Args:
      model: Config of a model or of a network.
      variables: Variables of the model, `{'params': …}`.
    """
    return remove_lora(*dequantize_model(*language_model(model, variables)))


def language_model(model: Config, variables: Mapping[str, Any]) -> tuple[Config, Mapping[str, Any]]:
    """Return the model that contains a network, and its weights.

    A `PolicyModel` becomes a `LanguageModel` of its policy, and a `DistillationModel` one of its
    student. A bare `TransformerLm` becomes the network of a `LanguageModel`, or of a `BertModel` if
    it is not causal. Other models are returned unchanged.

    Args:
      model: Config of a model or of a network.
      variables: Variables of the model, `{'params': …}`.
    """
    if issubclass(target_of(model), (PolicyModel, DistillationModel)):
        model = model.lm_tpl
        variables = {name: tree["lm"] for name, tree in variables.items() if "lm" in tree}
    if issubclass(target_of(model), TransformerLm):
        owner = LanguageModel if model.is_causal else BertModel
        model = owner.HParams.config(lm_tpl=model)
        variables = {name: {"lm": tree} for name, tree in variables.items()}
    return model, variables
