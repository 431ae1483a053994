"""Decoders of compressed weights, from the stored arrays to parts of a weight in float32.

A decoder checks the shapes and dtypes of the arrays of one weight, which are mapped from files. It
allocates nothing of their size until a part of the weight is read.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from layerkit.config.checks import require
from layerkit.interop.hugging_face.folder import Range, Ranges, TensorFileError

# Values of 4-bit floats with 2 bits of exponent (OCP Microscaling Formats 1.0, 2023, Table 5).
_FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_MXFP4_BLOCK, _MXFP4_BIAS = 32, 127
# Position in an int32 of each of eight consecutive outputs, as AutoAWQ's kernel needs them.
AWQ_POSITIONS = (0, 4, 1, 5, 2, 6, 3, 7)
_MAX_STATE_BYTES = 4096


CompressedWeight = tuple[tuple[int, ...], Callable[[Ranges], np.ndarray]]
"""Shape of a weight, and the function from the range of each axis to that part in float32."""


@dataclasses.dataclass(frozen=True)
class StoredParts:
    """The arrays of one compressed weight.

    Attributes:
      stem: Common start of the names of its tensors.
      arrays: Arrays by the rest of the name.
    """

    stem: str
    arrays: Mapping[str, np.ndarray]

    def get(self, name: str, kind: Any, shape: tuple[int | None, ...]) -> np.ndarray:
        """Return an array of a dtype, or kind of dtypes, and a shape, in which None is any size.

        Raises:
          TensorFileError: The array is missing, or has another dtype or shape.
        """
        array = self.arrays.get(name, np.zeros((0,) * 9))  # the absent one has no fitting shape
        sizes = array.shape[: len(shape)]
        fits = array.ndim == len(shape) and jnp.issubdtype(array.dtype, kind)
        fits = fits and all(a in (None, b) for a, b in zip(shape, sizes, strict=True))
        value = f"{array.dtype} {list(array.shape)}" if name in self.arrays else None
        expected = f"{kind.__name__} {list(shape)}, where None is any size"
        require(fits, None, f"tensor {self.stem}{name}", value, expected, TensorFileError)
        return array


def cut(ranges: Ranges) -> tuple[slice, ...]:
    """Return the slices of ranges."""
    return tuple(slice(*bounds) for bounds in ranges)


def unpack(
    packed: np.ndarray, axis: int, bits: int, bounds: Range, positions: tuple[int, ...] = ()
) -> np.ndarray:
    """Return unsigned integers that are packed along an axis, int16.

    Args:
      packed: Integers that each hold several smaller ones, the first in the lowest bits.
      axis: Axis along which they are packed.
      bits: Bits of a packed integer.
      bounds: Range of the packed integers to return.
      positions: Position of each one within its integer; empty for their order.
    """
    count = packed.dtype.itemsize * 8 // bits
    start, stop = bounds[0] // count, -(-bounds[1] // count)
    before, after = (slice(None),) * axis, (1,) * (packed.ndim - axis - 1)
    whole = packed[(*before, slice(start, stop))].view(f"u{packed.dtype.itemsize}")
    shifts = np.array(positions or range(count), whole.dtype) * bits
    values = np.expand_dims(whole, axis + 1) >> shifts.reshape(count, *after)
    values = (values & ((1 << bits) - 1)).astype(np.int16)
    values = values.reshape(*whole.shape[:axis], (stop - start) * count, *whole.shape[axis + 1 :])
    return values[(*before, slice(bounds[0] - start * count, bounds[1] - start * count))]


def look_up(table: np.ndarray, codes: np.ndarray, *, is_upper_first: bool = False) -> np.ndarray:
    """Return the float32 numbers of a table of 16 for both halves of bytes, `[..., 2 * bytes]`."""
    halves = [np.arange(256) & 15, np.arange(256) >> 4]
    # A pair of float32 is read as one float64, which is four times as fast.
    pairs = table[np.stack(halves[::-1] if is_upper_first else halves, 1)].view(np.float64)[:, 0]
    return pairs[codes].view(np.float32)


def _stated(options: Mapping[str, Any], key: str) -> list[Any]:
    """Return the values of a key in the groups of weights that compressed-tensors describes."""
    groups = (options.get("config_groups") or {}).values()
    values = [(group.get("weights") or {}).get(key) for group in groups]
    return [value for value in values if value]


def _group_size(options: Mapping[str, Any], inputs: int, groups: int) -> int:
    """Return the stated number of inputs of a group that fits; else, groups are of equal size."""
    fitting = [int(size) for size in _stated(options, "group_size") if -(-inputs // size) == groups]
    return [*fitting, inputs // groups][0]


def decode_scaled(
    parts: StoredParts, options: Mapping[str, Any], *, scales: str, factor: float = 1.0
) -> CompressedWeight:
    """Decode a matrix of 8-bit numbers with a scale for each block, each row, or all of it.

    Args:
      parts: Matrix `.weight` `[rows, columns]`, and scales `[blocks, blocks]`, `[rows]` or `[]`.
        `.weight_format` of bitsandbytes is 0, a matrix by rows.
      options: `quantization_config`. If it has no size of blocks, they are parts of rows.
      scales: Name of the scales.
      factor: Number by which all weights are multiplied in addition.
    """
    values, scale = parts.get(".weight", np.generic, (None, None)), parts.arrays[scales]
    if values.dtype.itemsize != 1:
        field, expected = f"dtype of {parts.stem}.weight", "a dtype of 8 bits"
        raise TensorFileError(field=field, value=f"{values.dtype}", expected=expected)
    if np.any(parts.arrays.get(".weight_format", 0)):
        raise TensorFileError(field=f"tensor {parts.stem}.weight_format", expected="0, for rows")
    # Four times as fast as a conversion of each number.
    table = np.arange(256, dtype=np.uint8).view(values.dtype).astype(np.float32)
    scale = scale.reshape(-1, 1) if scale.ndim < 2 else scale
    rows, columns = values.shape
    structures = _stated(options, "block_structure")
    if stated := options.get("weight_block_size") or (structures and structures[0]):
        blocks = [min(int(size), rows * columns) for size in stated]
    elif scale.size == 1:
        blocks = [rows, columns]
    else:
        blocks = [1, _group_size(options, columns, scale.shape[1])]
    counts = tuple(-(-size // block) for size, block in zip(values.shape, blocks, strict=True))
    scale = StoredParts(parts.stem, {scales: scale}).get(scales, jnp.floating, counts)

    def read(ranges: Ranges) -> np.ndarray:
        rows, columns = (np.arange(*one) // size for one, size in zip(ranges, blocks, strict=True))
        used = scale[rows[0] : rows[-1] + 1].astype(np.float32)[:, columns]
        part = table[values[cut(ranges)].view(np.uint8)] * used[rows - rows[0]]
        return part if factor == 1 else part * np.float32(factor)

    return values.shape, read


def decode_mxfp4(parts: StoredParts, options: Mapping[str, Any]) -> CompressedWeight:
    """Decode weights of experts `[experts, inputs, outputs]` in MXFP4.

    32 consecutive inputs share a power of two (OCP Microscaling Formats 1.0, 2023).
    """
    del options
    blocks = parts.get("_blocks", np.uint8, (None, None, None, _MXFP4_BLOCK // 2))
    scales = parts.get("_scales", np.uint8, blocks.shape[:-1])
    experts, outputs, groups = scales.shape

    def read(ranges: Ranges) -> np.ndarray:
        chosen, (start, stop), columns = ranges
        first = start // _MXFP4_BLOCK
        place = cut((chosen, columns, (first, -(-stop // _MXFP4_BLOCK))))
        powers = np.ldexp(np.float32(1), scales[place].astype(np.int32) - _MXFP4_BIAS)
        part = look_up(_FP4, blocks[place]) * powers[..., None]
        part = part.reshape(*powers.shape[:2], powers.shape[2] * _MXFP4_BLOCK).swapaxes(1, 2)
        return part[:, start - first * _MXFP4_BLOCK :][:, : stop - start]

    return (experts, groups * _MXFP4_BLOCK, outputs), read


def decode_gptq(
    parts: StoredParts, options: Mapping[str, Any], *, positions: tuple[int, ...] = ()
) -> CompressedWeight:
    """Decode the integers of GPTQ or AWQ.

    GPTQ (Frantar et al., 2022, arXiv:2210.17323) packs them along the inputs. Version 1 of its
    files has zero points minus 1: of whole int32s, with borrows, as GPTQModel converts them. AWQ
    (Lin et al., 2023, arXiv:2306.00978) packs integers along the outputs, at `positions`.
    """
    bits = options.get("bits", 4)
    count, is_awq = 32 // bits, bool(positions)
    scales = parts.get(".scales", jnp.floating, (None, None))
    groups, outputs = scales.shape
    width = -(-outputs // count)
    packed = parts.get(".qweight", np.int32, (None, width if is_awq else outputs))
    zeros = parts.get(".qzeros", np.int32, (groups, width)).view(np.uint32)
    is_exact = is_awq or "gptq_v2" in (options.get("checkpoint_format"), options.get("format"))
    ones = np.uint32(0 if is_exact else sum(1 << shift for shift in range(0, 32, bits)))

    def codes(rows: Range, columns: Range) -> np.ndarray:
        if is_awq:
            return unpack(packed[slice(*columns)], 1, bits, rows, positions).T
        return unpack(packed[:, slice(*rows)], 0, bits, columns).T

    return _decode_grouped(
        parts,
        (outputs, packed.shape[0] * (1 if is_awq else count)),
        codes,
        lambda rows: unpack(zeros + ones, 1, bits, rows, positions).T,
        scales.T,
        index_name=".g_idx",
        is_reordered=bool(options.get("desc_act")),
        group_size=int(options.get("group_size") or -1),
    )


def decode_packed(parts: StoredParts, options: Mapping[str, Any]) -> CompressedWeight:
    """Decode integers that compressed-tensors packs along the inputs, with half their range added.

    Zero points are packed along the outputs, with the same offset.
    """
    outputs, inputs = parts.get(".weight_shape", np.integer, (2,)).tolist()
    packed = parts.get(".weight_packed", np.int32, (outputs, None))
    bits = 8 if packed.shape[1] == -(-inputs // 4) else 4
    packed = parts.get(".weight_packed", np.int32, (outputs, -(-inputs * bits // 32)))
    scales, zeros = parts.get(".weight_scale", jnp.floating, (outputs, None)), None
    if ".weight_zero_point" in parts.arrays:
        shape = (-(-outputs * bits // 32), scales.shape[1])
        zeros = parts.get(".weight_zero_point", np.int32, shape)
    half = np.broadcast_to(np.int16(1 << (bits - 1)), (1, scales.shape[1]))
    return _decode_grouped(
        parts,
        (outputs, inputs),
        lambda rows, columns: unpack(packed[slice(*rows)], 1, bits, columns),
        lambda rows: half if zeros is None else unpack(zeros, 0, bits, rows),
        scales,
        index_name=".weight_g_idx",
        is_reordered=not {"group", "dynamic"}.isdisjoint(_stated(options, "actorder")),
        group_size=_group_size(options, inputs, scales.shape[1]),
    )


def _decode_grouped(
    parts: StoredParts,
    shape: tuple[int, int],
    codes: Callable[[Range, Range], np.ndarray],
    zeros: Callable[[Range], np.ndarray],
    scales: np.ndarray,
    *,
    index_name: str,
    is_reordered: bool,
    group_size: int,
) -> CompressedWeight:
    """Return the weight (codes - zeros) · scales, where groups of inputs share zeros and scales.

    `codes` returns `[outputs, inputs]` of ranges of both, `zeros` returns `[outputs, groups]` of a
    range of outputs, and `scales` are `[outputs, groups]`. The tensor `index_name` has the groups
    `[inputs]`. If it is absent, a group is `group_size` consecutive inputs; -1 is all. It may not
    be absent if `is_reordered`.
    """
    inputs, groups = shape[1], scales.shape[1]
    has_index = is_reordered or index_name in parts.arrays
    index = parts.get(index_name, np.integer, (inputs,)) if has_index else None
    size = group_size if group_size > 0 else inputs
    is_valid = -(-inputs // size) == groups
    if index is not None:
        is_valid = 0 <= index.min() <= index.max() < groups
    if not is_valid:
        expected = f"a group below {groups}, the number of scales, for each of {inputs} inputs"
        raise TensorFileError(field=f"groups of {parts.stem}", expected=expected)

    def read(ranges: Ranges) -> np.ndarray:
        rows, columns = ranges
        group = np.arange(*columns) // size if index is None else index[slice(*columns)]
        part = (codes(rows, columns) - zeros(rows)[:, group]).astype(np.float32)
        part *= scales[slice(*rows)].astype(np.float32)[:, group]
        return part

    return shape, read


def decode_bitsandbytes(parts: StoredParts, options: Mapping[str, Any]) -> CompressedWeight:
    """Decode nf4 or fp4 of bitsandbytes (Dettmers et al., 2023, arXiv:2305.14314).

    Consecutive numbers of the flat weight share a scale `absmax`. With double quantization, scales
    are indices of a table, times a scale for each group of them, plus an offset.
    """
    del options
    (name,) = [name for name in parts.arrays if name.startswith(".weight.quant_state.")]
    state = json.loads(parts.get(name, np.uint8, (None,))[:_MAX_STATE_BYTES].tobytes())
    shape = tuple(map(int, state["shape"]))
    size, row = math.prod(shape), math.prod(shape[1:])
    block = min(int(state["blocksize"]), size)  # sizes of arrays depend on it
    count = -(-size // block)
    flat = parts.arrays[".weight"].reshape(-1).view(np.uint8)  # it may be stored as floats
    packed = StoredParts(parts.stem, {".weight": flat}).get(".weight", np.uint8, (-(-size // 2),))
    table = parts.get(".weight.quant_map", np.float32, (16,))
    is_nested = "nested_blocksize" in state
    absmax = parts.get(".weight.absmax", np.uint8 if is_nested else np.float32, (count,))
    if is_nested:
        outer_block = min(int(state["nested_blocksize"]), count)
        offset = np.float32(float(state["nested_offset"]))
        outer_table = parts.get(".weight.nested_quant_map", np.float32, (256,))
        shape_of_outer = (-(-count // outer_block),)
        outer = parts.get(".weight.nested_absmax", np.float32, shape_of_outer)

    def read(ranges: Ranges) -> np.ndarray:
        start, stop = (bound * row for bound in ranges[0])
        first, last = start // block, -(-stop // block)
        scale = absmax[first:last]
        if is_nested:
            scale = outer_table[scale] * outer[np.arange(first, last) // outer_block] + offset
        part = look_up(table, packed[start // 2 : -(-stop // 2)], is_upper_first=True)
        part = part[start % 2 :][: stop - start]
        part *= np.repeat(scale, block)[start - first * block :][: stop - start]
        part = part.reshape(ranges[0][1] - ranges[0][0], *shape[1:])
        return part[(slice(None), *cut(ranges[1:]))]

    return shape, read
