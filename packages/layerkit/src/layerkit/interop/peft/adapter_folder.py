"""Reading of a folder of PEFT: adapter_config.json and adapter_model.safetensors.

The folder is untrusted. Every key is read, known not to change the computation, or an error.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from layerkit.config.checks import require
from layerkit.interop.hugging_face.folder import SafetensorsFolder, read_json
from layerkit.interop.hugging_face.importing import TensorMismatchError, require_finite
from layerkit.interop.hugging_face.keys import ConfigFile
from layerkit.interop.hugging_face.tensors import Piece, their_shapes

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
"""Prefix of the names of tensors."""
MAX_SHOWN = 10
"""Largest number of parts of a folder that an error lists."""
SUFFIXES = {
    "lora_a": ".lora_A.weight",
    "lora_b": ".lora_B.weight",
    "lora_magnitude": ".lora_magnitude_vector",
}
"""Suffixes of the tensors of a module. Newer versions also append `.weight` to the last."""
# Keys that do not change the computation: names, initial values, the model's place, and the modules
# that have adapters, which the tensors name.
# fmt: off
_NEUTRAL = frozenset({
    "auto_mapping", "base_model_name_or_path", "corda_config", "eva_config", "exclude_modules",
    "fan_in_fan_out", "inference_mode", "layers_pattern", "layers_to_transform", "loftq_config",
    "lora_ga_config", "megatron_config", "megatron_core", "modules_to_save", "peft_version",
    "qalora_group_size", "revision", "target_modules", "task_type",
})
# fmt: on
# Values of init_lora_weights that leave the weights of the model as they are.
_INITIAL = (True, False, None, "gaussian", "eva", "orthogonal")
# A regular expression of an untrusted folder must not take exponential time.
_MAX_PATTERNS = 4096
_PATTERN = re.compile(r"\^?(\w|\\?\.|-)*(\.\*(\w|\\?\.|-)*){0,2}\$?")


class AdapterFolder:
    """A LoRA adapter in a folder of PEFT; its tensors are mapped into memory.

    Attributes:
      path: The folder.
      weight: Factor of the adapter.
      rank_stabilized: Factors are alpha / √rank.
      has_magnitude: The adapter has norms of columns (DoRA).
      kinds: Kinds of tensors of each module, such as `lora_a`.
      dropout_rate: Dropout rate of the adapter's inputs in training.
      ties_weights: A saved tensor also stands for those that are tied to it.
      modules: Names of the modules with adapters.
      tensors: Names of the tensors of each module, such as its `lora_a`.
      saved: Names of the tensors that replace those of the model.
      source: Tensors of the folder.

    Raises:
      FileNotFoundError: A file is missing.
      UnsupportedModelError: The folder has another kind of adapter, or an unsupported option.
      TensorMismatchError: The tensors do not fit adapter_config.json.
    """

    def __init__(self, path: str | os.PathLike[str], *, weight: float = 1.0):
        """Read the config and the header of the tensors."""
        self.path, self.weight = Path(path), weight
        content, owner = read_json(path, ADAPTER_CONFIG), str(self.path / ADAPTER_CONFIG)
        if not (self.path / ADAPTER_WEIGHTS).is_file():
            raise FileNotFoundError(
                f"{path}: expected {ADAPTER_WEIGHTS}. An adapter_model.bin is a pickle, which could"
                " run code: load the adapter in PEFT, and save it with save_pretrained(NEW_FOLDER)."
            )
        self._read_config(ConfigFile(content, neutral=_NEUTRAL, owner=owner))
        self.source = SafetensorsFolder(path, file=ADAPTER_WEIGHTS)
        self.tensors: dict[tuple[str, str], str] = {}
        self.saved: dict[str, str] = {}
        for stored in self.source.names():
            name = stored.removeprefix(PREFIX)
            for kind, suffix in SUFFIXES.items():
                module = name.removesuffix(suffix).removesuffix(f"{suffix}.weight")
                if module != name:
                    self.tensors[module, kind] = stored
                    break
            else:
                self.saved[name] = stored
        self.modules = list(dict.fromkeys(module for module, _ in self.tensors))
        needed = {(module, kind) for module in self.modules for kind in self.kinds}
        if wrong := sorted(needed ^ self.tensors.keys())[:MAX_SHOWN]:
            owner, expected = str(self.path / ADAPTER_WEIGHTS), f"{self.kinds} in each module"
            raise TensorMismatchError(owner=owner, value=wrong, expected=expected)

    def _read_config(self, file: ConfigFile) -> None:
        for key, value, default in (("peft_type", "LORA", None), ("bias", "none", "none")):
            if file.get(key, default) != value:
                raise file.invalid(key, repr(value))
        if file.get("init_lora_weights", True) not in _INITIAL:
            hint = "It changes the weights of the model. Save the adapter with"
            hint += " path_initial_model_for_weight_conversion in PEFT."
            raise file.invalid("init_lora_weights", choices=[*map(str, _INITIAL)], hint=hint)
        self._ranks = _values(file, "r", "rank_pattern")
        self._alphas = _values(file, "lora_alpha", "alpha_pattern")
        self.rank_stabilized = bool(file.get("use_rslora", False))
        self.has_magnitude = bool(file.get("use_dora", False))
        self.kinds = ["lora_a", "lora_b"] + ["lora_magnitude"] * self.has_magnitude
        self.dropout_rate = file.get("lora_dropout", 0.0)
        if self.dropout_rate != 0 and not _is_positive(self.dropout_rate, below=1):
            raise file.invalid("lora_dropout", "a number of 0 or more, below 1")
        self.ties_weights = bool(file.get("ensure_weight_tying", False))
        file.require_all_read()

    def rank(self, module: str) -> int:
        """Return the rank of a module, such as `model.layers.0.self_attn.q_proj`."""
        return int(_value_of(module, self._ranks))

    def scale(self, module: str) -> float:
        """Return the factor of a module's product B·A."""
        rank = self.rank(module)
        return _value_of(module, self._alphas) / (math.sqrt(rank) if self.rank_stabilized else rank)

    def locate(self, name: str, pieces: Sequence[Piece]) -> list[Piece]:
        """Return the pieces of a tensor under its name in this folder.

        Raises:
          TensorMismatchError: It has another shape than the pieces together.
        """
        located = [dataclasses.replace(piece, name=name) for piece in pieces]
        shape, stored = their_shapes(located)[name], self.source.shape(name)
        owner, field = str(self.path / ADAPTER_WEIGHTS), f"shape of {name}"
        expected = f"{list(shape)}, as in the model and {ADAPTER_CONFIG}"
        require(stored == shape, owner, field, list(stored), expected, TensorMismatchError)
        return located

    def read(self, piece: Piece) -> np.ndarray:
        """Return a part of a tensor in float32.

        Raises:
          TensorMismatchError: It is not finite.
        """
        part = piece.read(self.source, tuple((0, size) for size in piece.shape))
        return require_finite(np.asarray(part, np.float32), piece.name)


def _is_positive(value: Any, *, below: int = 1 << 31) -> bool:
    return isinstance(value, (int, float)) and 0 < value < below


def _values(file: ConfigFile, key: str, patterns_key: str) -> list[tuple[re.Pattern[str], float]]:
    """Return (pattern of names of modules, value) of each pattern in order, and of all others."""
    default, patterns = file.get(key, 8), file.get(patterns_key, None) or {}
    if not _is_positive(default):
        raise file.invalid(key, "a positive number")
    if not isinstance(patterns, dict) or len(patterns) > _MAX_PATTERNS:
        raise file.invalid(patterns_key, f"an object of at most {_MAX_PATTERNS} patterns")
    for pattern, value in patterns.items():
        if not _is_positive(value) or not _PATTERN.fullmatch(pattern):
            expected = "positive numbers by names of modules, with at most two .*"
            raise file.invalid(patterns_key, expected)
    values = [(re.compile(rf"(.*\.)?({pattern})"), value) for pattern, value in patterns.items()]
    return [*values, (re.compile(".*", re.DOTALL), default)]


def _value_of(module: str, values: list[tuple[re.Pattern[str], float]]) -> float:
    return next(value for pattern, value in values if pattern.fullmatch(module))
