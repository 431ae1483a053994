"""WebDataset, an input of images in tar files with the layout of the library of that name.

The files of a sample follow one another and share the part of their path before the first dot of
the name: `a/17.jpg`, `a/17.cls`. The label is the integer in `.cls` or `.txt`, or a field of the
object in `.json`. The first batch reads the headers and the labels of all tars, to find images by
number. Nothing is extracted to the disk, and no size in a header is trusted.
"""

from __future__ import annotations

import functools
import itertools
import json
import operator
import re
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from layerkit.config.checks import require
from layerkit_inputs.base.base_input import counted
from layerkit_inputs.base.errors import is_storage_failure
from layerkit_inputs.base.find_files import find_text_files
from layerkit_inputs.images.decode_image import SUFFIXES
from layerkit_inputs.images.image_input import EncodedImage, ImageInput

MAX_IMAGE_BYTES = 1 << 28
"""Largest number of bytes of a file in a tar."""
_MAX_TEXT_BYTES = 1 << 16
"""Largest number of bytes of a label, and of a long name."""
_TEXT_SUFFIXES = (".cls", ".txt", ".json")
_NO_SAMPLE = (ValueError, LookupError, TypeError, RecursionError, OverflowError)


class WebDataset(ImageInput):
    """An input of the images and labels of uncompressed tar files."""

    paths: Sequence[str]
    """Tar files in the order of their rows, folders of them, patterns, or ranges such as
    `imagenet-train-{000000..001281}.tar`."""
    label_field: str = "label"
    """Name of the label, an integer, in the objects of `.json`."""

    @functools.cached_property
    def _shards(self) -> list[Path]:
        entries = [path for entry in self.paths for path in expand_ranges(entry)]
        files = [file.path for entry in entries for file in find_text_files([entry])]
        shards = [path for path in files if path.suffix == ".tar"]
        require(shards, self._label, "paths", list(self.paths), "uncompressed .tar files")
        return shards

    @functools.cached_property
    def _samples(self) -> np.ndarray:
        """Shard, offset, size and label of each image, int64 `[images, 4]`."""
        shard_samples = [
            [(number, *sample) for sample in self._samples_of(path)]
            for number, path in enumerate(self._shards)
        ]
        return np.concatenate([np.array(some, np.int64).reshape(-1, 4) for some in shard_samples])

    def _samples_of(self, path: Path) -> Iterator[tuple[int, int, int]]:
        """Yield offset, size and label of each image of a tar."""
        try:
            with tarfile.open(path, "r:", tarinfo=_BoundedMember) as archive:
                for key, members in itertools.groupby(_files_of(archive), _key):
                    files = {file.name[len(key) :].lower(): file for file in members}
                    try:
                        yield self._sample(archive, files)
                    except _NO_SAMPLE as error:
                        problem = f"expected one image and an integer label ({error!r})"
                        self._bad.report(file=f"{path}, {key}", record=None, problem=problem)
        except (tarfile.TarError, OSError, OverflowError) as error:
            if is_storage_failure(error):
                raise
            self._bad.report(file=str(path), record=None, problem=f"not a whole tar ({error})")

    def _sample(self, archive: tarfile.TarFile, files: dict[str, Any]) -> tuple[int, int, int]:
        (image,) = (files[suffix] for suffix in files if suffix in SUFFIXES)
        suffix, *_ = (suffix for suffix in _TEXT_SUFFIXES if suffix in files)
        text: Any = archive.extractfile(files[suffix])
        data = text.read(_MAX_TEXT_BYTES)
        is_object = suffix == ".json"
        label = operator.index(json.loads(data)[self.label_field]) if is_object else int(data)
        return image.offset_data, image.size, int(np.int64(label))

    def _num_images(self) -> int:
        return len(self._samples)

    def _encoded(self, row: int) -> EncodedImage:
        shard, offset, size, label = self._samples[row].tolist()
        path = self._shards[shard]
        with path.open("rb") as file:
            file.seek(offset)
            return EncodedImage(file.read(size), label, f"{path}, byte {offset}")

    def _data_text(self) -> str:
        images, shards = counted(len(self._samples), "image"), counted(len(self._shards), "tar")
        return f"{images} in {shards}"

    def _fingerprint(self) -> dict[str, Any]:
        return {"samples_crc32": zlib.crc32(self._samples.tobytes())}


class _BoundedMember(tarfile.TarInfo):
    """A header of a tar, of which the size is checked before anything of that size is read."""

    @classmethod
    def frombuf(cls, *args: Any, **kwargs: Any) -> Any:
        """Return the header in a block of bytes; raise `ReadError` if it declares too much."""
        return _bounded(super().frombuf(*args, **kwargs))


def _bounded(member: tarfile.TarInfo) -> tarfile.TarInfo:
    is_file = member.type in (*tarfile.REGULAR_TYPES, tarfile.DIRTYPE)
    most = MAX_IMAGE_BYTES if is_file else _MAX_TEXT_BYTES
    if not 0 <= member.size <= most:
        raise tarfile.ReadError(f"{member.size} bytes of {member.name!r}, expected 0 to {most}")
    return member


def _files_of(archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    for member in archive:
        # Extended headers may change the size of a header that was checked.
        if _bounded(member).isreg() and not member.issparse():
            yield member


def _key(file: tarfile.TarInfo) -> str:
    """Return the path of a file up to the first dot of its name."""
    folder, slash, name = file.name.rpartition("/")
    return f"{folder}{slash}{name.partition('.')[0]}"


def expand_ranges(path: str) -> list[str]:
    """Return the paths of a path with ranges: those of `a-{08..10}` are `a-08`, `a-09`, `a-10`."""
    match = re.fullmatch(r"(.*?)\{(\d+)\.\.(\d+)\}(.*)", path)
    if match is None:
        return [path]
    before, first, last, after = match.groups()
    numbers = range(int(first), int(last) + 1)
    return [f"{before}{n:0{len(first)}}{rest}" for n in numbers for rest in expand_ranges(after)]
