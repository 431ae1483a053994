"""Folders with compressed weights, as a source of tensors that looks like an uncompressed folder.

`quantization_config` in config.json names the method. Which weights are compressed is seen from the
tensors, so that lists such as `modules_to_not_convert` need not be read. A weight is decoded part
by part, when it is read. Rounding of activations, which some methods add, is left out.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from layerkit.interop.hugging_face.compressed import decoders
from layerkit.interop.hugging_face.folder import (
    CONFIG,
    Ranges,
    SafetensorsFolder,
    TensorFileError,
    read_json,
    stored_dtype,
)
from layerkit.interop.hugging_face.keys import QUANTIZED_HINT, UnsupportedModelError

KEY = "quantization_config"
"""Key of config.json that describes the compression."""

# What decoders raise for values that are not checked.
_INVALID = (AttributeError, TypeError, LookupError, ArithmeticError, ValueError, RecursionError)
# Numbers that are decoded at a time.
_CHUNK = 1 << 22
# Keys that concern how weights were computed, which modules were left out, or activations.
# fmt: off
_NEUTRAL = frozenset({
    "act_group_aware", "activation_scale_ub", "activation_scheme", "backend", "batch_size",
    "block_name_to_quantize", "bnb_4bit_compute_dtype", "bnb_4bit_quant_storage",
    "bnb_4bit_quant_type", "bnb_4bit_use_double_quant", "cache_block_outputs", "config_groups",
    "damp_percent", "dataset", "dequantize", "desc_act", "do_fuse", "exllama_config",
    "fuse_max_seq_len", "global_compression_ratio", "group_size", "ignore", "ignored_layers",
    "llm_int8_enable_fp32_cpu_offload", "llm_int8_has_fp16_weight", "llm_int8_skip_modules",
    "llm_int8_threshold", "lm_head", "load_in_4bit", "load_in_8bit", "max_input_length", "meta",
    "model_file_base_name", "model_name_or_path", "model_seqlen",
    "module_name_preceding_first_block", "modules_in_block_to_quantize", "modules_to_convert",
    "modules_to_fuse", "modules_to_not_convert", "pad_token_id", "quant_method",
    "quantization_status", "scale_fmt", "sparsity_config", "static_groups", "sym", "tokenizer",
    "true_sequential", "use_cuda_fp16", "use_exllama", "use_optimized_inference", "version",
    "weight_block_size", "zero_point",
})
# fmt: on


@dataclasses.dataclass(frozen=True)
class Format:
    """A format of compressed weights.

    Attributes:
      mark: End of the name of a tensor that only weights of this format have.
      parts: Ends of the names of the other tensors of a weight.
      decode: Function from the tensors and `quantization_config` to the weight.
      weight: End of the name of the weight.
    """

    mark: str
    parts: tuple[str, ...]
    decode: Callable[[decoders.StoredParts, Mapping[str, Any]], decoders.CompressedWeight]
    weight: str = ".weight"


@dataclasses.dataclass(frozen=True)
class Method:
    """A method of compression, one `quant_method`.

    Attributes:
      formats: Formats of its weights, in the order in which their marks are looked for.
      keys: Keys of `quantization_config` with their supported values.
      unused: Ends of the names of tensors that concern activations alone.
    """

    formats: tuple[Format, ...]
    keys: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    unused: tuple[str, ...] = ()


def _scaled(mark: str, *parts: str, factor: float = 1.0) -> Format:
    decode = functools.partial(decoders.decode_scaled, scales=mark, factor=factor)
    return Format(mark, (".weight", *parts), decode)


_decode_awq = functools.partial(decoders.decode_gptq, positions=decoders.AWQ_POSITIONS)
_GROUPED = (".qzeros", ".scales", ".g_idx")
_PACKED = (".weight_scale", ".weight_shape", ".weight_zero_point", ".weight_g_idx")
_STATE = ".weight.quant_state.bitsandbytes__"
_NESTED = (".weight.nested_absmax", ".weight.nested_quant_map")
_TABLES = (".weight", ".weight.absmax", ".weight.quant_map", *_NESTED)

METHODS = {
    # DeepSeek V3, Qwen3-FP8
    "fp8": Method(
        (_scaled(".weight_scale_inv"),),
        {"fmt": ("e4m3",), "expert_dtype": ("fp8",)},
        unused=(".activation_scale",),
    ),
    "fbgemm_fp8": Method((_scaled(".weight_scale"),), unused=(".input_scale_ub",)),
    # GPT-OSS
    "mxfp4": Method((Format("_blocks", ("_scales",), decoders.decode_mxfp4, weight=""),)),
    "gptq": Method(
        (Format(".qweight", _GROUPED, decoders.decode_gptq),),
        {
            "bits": (2, 4, 8),
            "checkpoint_format": ("gptq", "gptq_v2"),
            "format": ("gptq", "gptq_v2"),
            "pack_dtype": ("int32",),
        },
    ),
    "awq": Method(
        (Format(".qweight", _GROUPED, _decode_awq),),
        {"bits": (4,), "version": ("gemm", "GEMM"), "format": ("gemm",)},
    ),
    "bitsandbytes": Method(
        (
            Format(_STATE + "nf4", _TABLES, decoders.decode_bitsandbytes),
            Format(_STATE + "fp4", _TABLES, decoders.decode_bitsandbytes),
            _scaled(".SCB", ".weight_format", factor=1 / 127),
        ),
    ),
    "compressed-tensors": Method(
        # Packed weights first, which have a `weight_scale` too.
        (Format(".weight_packed", _PACKED, decoders.decode_packed), _scaled(".weight_scale")),
        {"format": ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized")},
        unused=(".input_scale",),
    ),
}
"""Supported methods by `quant_method`."""


def compression_of(content: Mapping[str, Any]) -> tuple[Method, Mapping[str, Any]] | None:
    """Return the method of compression and the options of its decoders; None for plain weights.

    Args:
      content: Content of config.json.

    Raises:
      UnsupportedModelError: The method, a key or a value is not supported.
    """
    options = content.get(KEY)
    if not options:
        return None
    if not isinstance(options, dict):
        raise UnsupportedModelError(field=KEY, value=options, expected="an object")
    # Older folders of bitsandbytes do not name it.
    is_bits = options.get("load_in_4bit") or options.get("load_in_8bit")
    name = options.get("quant_method", "bitsandbytes" if is_bits else None)
    if not isinstance(name, str) or name not in METHODS:
        field = f"{KEY}.quant_method"
        raise UnsupportedModelError(field=field, value=name, choices=METHODS, hint=QUANTIZED_HINT)
    for key, value in options.items():
        choices = METHODS[name].keys.get(key, ())
        # Transformers writes private copies of keys.
        is_neutral = not choices and (key in _NEUTRAL or key.startswith("_") or not value)
        if not is_neutral and value not in choices:
            field, hint = f"{KEY}.{key}", None if choices else QUANTIZED_HINT
            raise UnsupportedModelError(field=field, value=value, choices=choices, hint=hint)
    return METHODS[name], options


class CompressedFolder(SafetensorsFolder):
    """The tensors of a folder with compressed weights, each under the name of the plain weight.

    Args:
      folder: Folder with safetensors files.
      method: Method of compression.
      options: Options of the decoders.
      dtype: Dtype that is stated for decoded weights.

    Raises:
      TensorFileError: See `SafetensorsFolder`; or a tensor of a compressed weight is missing, or
        has another dtype or shape than its method needs.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        method: Method,
        options: Mapping[str, Any],
        *,
        dtype: Any,
    ):
        """Check and map the files, and the shapes of the compressed weights."""
        super().__init__(folder)
        self._weights: dict[str, decoders.CompressedWeight] = {}
        self._dtype = jnp.dtype(dtype)
        stored = set(super().names())
        used = {name for name in stored if name.endswith(method.unused)}
        for form in method.formats:
            for name in [name for name in stored - used if name.endswith(form.mark)]:
                stem = name.removesuffix(form.mark)
                parts = {part for part in (form.mark, *form.parts) if stem + part in stored}
                used |= {stem + part for part in parts}
                arrays = {part: super(CompressedFolder, self).tensor(stem + part) for part in parts}
                try:
                    weight = form.decode(decoders.StoredParts(stem, arrays), options)
                except _INVALID as error:
                    problem = f"tensors of {stem} cannot be decoded"
                    raise TensorFileError(problem, owner=str(folder), hint=f"{error}") from error
                self._weights[stem + form.weight] = weight
        if both := sorted(self._weights.keys() & (stored - used)):
            raise TensorFileError("both plain and compressed", owner=str(folder), value=both)
        self._names = sorted(self._weights.keys() | (stored - used))

    def names(self) -> list[str]:
        """Return the names of all tensors, sorted."""
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self._weights[name][0] if name in self._weights else super().shape(name)

    def dtype(self, name: str) -> np.dtype:
        """Return the dtype of a tensor; that of `CompressedFolder` for a compressed one."""
        return self._dtype if name in self._weights else super().dtype(name)

    def tensor(self, name: str) -> np.ndarray:
        """Return a tensor; a compressed one is decoded."""
        if name not in self._weights:
            return super().tensor(name)
        return self.read(name, [(0, size) for size in self.shape(name)])

    def read(self, name: str, ranges: Ranges) -> np.ndarray:
        """Return the part of a tensor in the range (start, stop) of each axis.

        A compressed tensor is decoded, some rows at a time, in float32.
        """
        if name not in self._weights:
            return super().read(name, ranges)
        shape = [len(range(*bounds)) for bounds in ranges]
        result = np.empty(shape, np.float32)
        step = max(_CHUNK // max(math.prod(shape[1:]), 1), 1)
        for row in range(0, shape[0], step):
            part = result[row : row + step]
            start = ranges[0][0] + row
            part[...] = self._weights[name][1]([(start, start + len(part)), *ranges[1:]])
        return result


def open_tensors(folder: str | os.PathLike[str]) -> SafetensorsFolder:
    """Return the tensors of a folder, of which compressed ones are decoded when they are read.

    Raises:
      FileNotFoundError: A file is missing.
      UnsupportedModelError: The compression is not supported.
      TensorFileError: See `SafetensorsFolder` and `CompressedFolder`.
    """
    try:
        compression = compression_of(read_json(folder))
    except UnsupportedModelError as error:
        error.owner = os.path.join(folder, CONFIG)
        raise
    if compression is None:
        return SafetensorsFolder(folder)
    return CompressedFolder(folder, *compression, dtype=stored_dtype(folder))
