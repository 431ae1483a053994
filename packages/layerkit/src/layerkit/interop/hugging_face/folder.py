"""Reading of Hugging Face folders: config.json and safetensors files.

Files are mapped into memory, so that a host reads only the part of a tensor that it needs.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from layerkit.base.weights import floating_dtype
from layerkit.config.checks import require
from layerkit.errors import ConfigError, first_names, hub_hint, pip_install, short_repr
from layerkit.interop.hugging_face.keys import NEWER_SPELLINGS
from layerkit.interop.hugging_face.other_forms import other_form

# (start, stop), perhaps with a step, on one axis, and on each axis.
Range = tuple[int, ...]
Ranges = Sequence[Range]

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
# Limits far above the sizes in published folders, which still can be read within seconds.
_MAX_INDEX_BYTES = 64 << 20
_MAX_CONFIG_BYTES = 4 << 20
_MAX_TENSORS = 1 << 18
# Files of tokenizers, and generation defaults, which are copied unchanged.
COMPANIONS = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "spiece.model",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)

_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}


class TensorFileError(ConfigError):
    """An error about a safetensors file, or their index, that is damaged or inconsistent."""


class SafetensorsFolder:
    """The tensors of a folder, mapped into memory.

    Args:
      folder: Folder with `model.safetensors`, or with several files and their index. Each tensor is
        read from the file that the index names. Files `model-00001-of-00002.safetensors` and so on
        need no index.
      file: Name of the one file to read instead; None for the files of a model.

    Raises:
      FileNotFoundError: The folder has no such files.
      TensorFileError: A file is damaged, or the index names files outside of the folder or tensors
        that the files lack.
      ImportError: The package safetensors is not installed.
    """

    def __init__(self, folder: str | os.PathLike[str], *, file: str | None = None):
        """Check and map the files of a folder."""
        safetensors = import_safetensors()
        # Entry of the header of each tensor, and the bytes of the tensors of its file.
        self._tensors: dict[str, tuple[dict[str, Any], np.ndarray]] = {}
        files = _weight_files(Path(folder)) if file is None else {Path(folder, file): None}
        for path, listed in files.items():
            try:
                # Its arrays cannot have 8-bit floats, so it checks the header alone.
                with safetensors.safe_open(path, framework="np") as opened:
                    names = opened.keys() if listed is None else listed
                    _check_count(path, len(names))
                    for name in names:
                        opened.get_slice(name)  # raises for a name that the file lacks
            except safetensors.SafetensorError as error:
                hint = "Download or copy the folder again."
                problem = f"cannot be read: {error}"
                raise TensorFileError(problem, owner=str(path), hint=hint) from error
            if repeated := sorted(self._tensors.keys() & names):
                raise TensorFileError("in several files", owner=str(path), value=repeated)
            content = np.memmap(path, np.uint8, "r")
            start = 8 + int.from_bytes(content[:8].tobytes(), "little")
            header = json.loads(content[8:start].tobytes())
            self._tensors |= {name: (header[name], content[start:]) for name in names}

    def names(self) -> list[str]:
        """Return the names of all tensors, sorted."""
        return sorted(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return tuple(self._tensors[name][0]["shape"])

    def dtype(self, name: str) -> np.dtype:
        """Return the dtype of a tensor.

        Raises:
          TensorFileError: NumPy does not have the dtype.
        """
        stored = self._tensors[name][0]["dtype"]
        if stored not in _DTYPES:
            field = f"dtype of tensor {name}"
            raise TensorFileError(field=field, value=stored, choices=_DTYPES)
        return jnp.dtype(_DTYPES[stored])

    def tensor(self, name: str) -> np.ndarray:
        """Return a tensor, whose parts are read from the file when they are used."""
        entry, content = self._tensors[name]
        start, stop = entry["data_offsets"]
        return content[start:stop].view(self.dtype(name)).reshape(self.shape(name))

    def read(self, name: str, ranges: Ranges) -> np.ndarray:
        """Return the part of a tensor in the range (start, stop) of each axis."""
        return self.tensor(name)[tuple(slice(*bounds) for bounds in ranges)]


def _weight_files(folder: Path) -> Mapping[Path, list[str] | None]:
    """Return the tensors to read from each file of a folder; None stands for all tensors."""
    if (folder / WEIGHTS).is_file():
        return {folder / WEIGHTS: None}
    files: Mapping[Path, list[str] | None]
    if (folder / INDEX).is_file():
        files = {folder / file: names for file, names in _read_index(folder).items()}
    elif shards := sorted(folder.glob("model-?????-of-?????.safetensors")):
        count = shards[0].name.rpartition("-")[2]
        numbers = range(1, int(count.partition(".")[0]) + 1)
        files = {folder / f"model-{number:05d}-of-{count}": None for number in numbers}
    else:
        raise FileNotFoundError(f"{folder}: expected {WEIGHTS} or {INDEX}.{other_form(folder)}")
    if missing := [path.name for path in files if not path.is_file()]:
        raise FileNotFoundError(f"{folder}: missing {first_names(missing)}. Download it again.")
    return files


def _read_index(folder: Path) -> dict[str, list[str]]:
    """Return the names of the tensors in each file that the index of a folder names."""
    weight_map: Any = read_json(folder, INDEX).get("weight_map")
    owner, expected = str(folder / INDEX), "an object with the file of each tensor"
    is_map = isinstance(weight_map, dict) and bool(weight_map)
    require(is_map, owner, "weight_map", weight_map, expected, TensorFileError)
    _check_count(folder / INDEX, len(weight_map))
    files: dict[str, list[str]] = {}
    for name, file in weight_map.items():
        is_name = isinstance(file, str) and file not in ("", ".", "..")
        is_name = is_name and not set(file) & {"/", "\\", "\0"}
        field, expected = f"weight_map[{short_repr(name)}]", "the name of a file in the same folder"
        require(is_name, owner, field, file, expected, TensorFileError)
        files.setdefault(file, []).append(name)
    return files


def _check_count(path: Path, number: int) -> None:
    is_few, expected = number <= _MAX_TENSORS, f"at most {_MAX_TENSORS}"
    require(is_few, str(path), "number of tensors", number, expected, TensorFileError)


def tensor_names(folder: str | os.PathLike[str]) -> list[str] | None:
    """Return the names of the tensors that a folder declares; None for a folder without tensors.

    Raises:
      TensorFileError: A file or the index is invalid; see `SafetensorsFolder`.
    """
    folder = Path(folder)
    if (folder / INDEX).is_file() and not (folder / WEIGHTS).is_file():
        # Its files may be absent, since a plan needs no weights.
        return [name for names in _read_index(folder).values() for name in names]
    try:
        return SafetensorsFolder(folder).names()
    except FileNotFoundError:
        return None


def read_json(folder: str | os.PathLike[str], name: str = CONFIG) -> dict[str, Any]:
    """Read a JSON object from a file of a folder.

    The keys of `text_config`, which the config.json of a model of text and images has, are added to
    those of the object.

    Raises:
      FileNotFoundError: The file does not exist.
      ConfigError: The file is too long, or holds no JSON object.
    """
    path = Path(folder) / name
    if not path.is_file():
        hint = other_form(path.parent)
        if not path.parent.exists() and (command := hub_hint(str(folder))):
            hint = f" {command}"
        raise FileNotFoundError(f"{path}: no such file. Expected a Hugging Face folder.{hint}")
    limit = _MAX_INDEX_BYTES if name == INDEX else _MAX_CONFIG_BYTES
    size = path.stat().st_size
    require(size <= limit, str(path), "size in bytes", size, f"at most {limit}")
    try:
        content = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"cannot be read as JSON: {error}", owner=str(path)) from error
    if not isinstance(content, dict):
        raise ConfigError(
            owner=str(path), field="type", value=type(content).__name__, expected="a JSON object"
        )
    text = content.get("text_config") if name == CONFIG else None
    return {**text, **content} if isinstance(text, dict) else content


def stored_dtype(folder: str | os.PathLike[str]) -> str:
    """Return the dtype of the weights as stated in config.json.

    If it states none, that is float32, or bfloat16 for compressed weights. It is bfloat16 for 8-bit
    floats as well, in which layers do not compute.

    Raises:
      FileNotFoundError: The folder has no config.json.
      ConfigError: config.json states another dtype than a floating one.
    """
    content = read_json(folder)
    usual = "bfloat16" if content.get("quantization_config") else "float32"
    newer = content.get(NEWER_SPELLINGS["torch_dtype"])
    stated = str(newer or content.get("torch_dtype") or usual)
    owner = str(Path(folder) / CONFIG)
    dtype = floating_dtype(stated.removeprefix("torch."), field="dtype", owner=owner)
    return "bfloat16" if dtype.itemsize == 1 else dtype.name


def eos_id(folder: str | os.PathLike[str]) -> int | tuple[int, ...] | None:
    """Return the end token or tokens of a folder, for `Decoder.eos_id`; None if it has none.

    They are those of generation_config.json and those of config.json, except for ids that the
    vocabulary lacks, which never come.

    Raises:
      FileNotFoundError: Both files are missing.
      ConfigError: A value is no integer and no list of integers.
    """
    names = [name for name in ("generation_config.json", CONFIG) if (Path(folder) / name).is_file()]
    ids: list[int] = []
    for name in names or [CONFIG]:
        stated = read_json(folder, name).get("eos_token_id")
        several = stated if isinstance(stated, list) else [] if stated is None else [stated]
        if not all(type(one) is int for one in several):
            owner, expected = str(Path(folder) / name), "an integer, or a list of integers"
            raise ConfigError(owner=owner, field="eos_token_id", value=stated, expected=expected)
        ids += several
    vocab_size = read_json(folder).get("vocab_size") if CONFIG in names else None
    size = vocab_size if isinstance(vocab_size, int) else 2**31
    unique = tuple(dict.fromkeys(one for one in ids if 0 <= one < size))
    return unique if len(unique) > 1 else next(iter(unique), None)


def tokenizer_file(folder: str | os.PathLike[str]) -> str | None:
    """Return the path of the tokenizer's vocabulary in a folder; None if it has none."""
    names = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json")
    paths = (Path(folder) / name for name in names)
    return next((str(path) for path in paths if path.is_file()), None)


def max_length(folder: str | os.PathLike[str]) -> int | None:
    """Return the largest number of positions that config.json declares; None if it has none."""
    content = read_json(folder)
    return content.get("max_position_embeddings", content.get("n_positions"))


def write_json(folder: Path, name: str, content: Mapping[str, Any]) -> None:
    """Write a JSON file into a folder."""
    (folder / name).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def copy_companions(source: str | os.PathLike[str], target: Path) -> None:
    """Copy the tokenizer's files and the generation defaults."""
    variants = Path(source).glob("additional_chat_templates/*.jinja")
    for name in [*COMPANIONS, *(str(path.relative_to(source)) for path in variants)]:
        if (Path(source) / name).is_file():
            (target / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(Path(source) / name, target / name)


def same_tensor(source: SafetensorsFolder, first: str, second: str) -> bool:
    """Return whether two tensors are bitwise equal, comparing some megabytes at a time."""
    if source.shape(first) != source.shape(second) or source.dtype(first) != source.dtype(second):
        return False
    one, other = (source.tensor(name).reshape(-1).view(np.uint8) for name in (first, second))
    step = 1 << 26
    parts = (slice(start, start + step) for start in range(0, one.size, step))
    return all(np.array_equal(one[part], other[part]) for part in parts)


def import_safetensors() -> Any:
    """Return the package safetensors.

    Raises:
      ImportError: It is not installed.
    """
    try:
        import safetensors.numpy
    except ImportError as error:
        raise ImportError(
            f"Hugging Face folders require safetensors: {pip_install('layerkit', 'hf')}"
        ) from error
    return safetensors
