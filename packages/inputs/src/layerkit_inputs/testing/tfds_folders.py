"""Small TensorFlow Datasets folders in the format of large data sets, for tests.

Code that reads C4 needs C4, which is 300 GB. `write_tfds_folder` writes a folder with the same
name, version, features, splits and file layout, and a few dozen texts. `tfds.load` and
`seqio.TfdsDataSource` read it like the original:

    write_tfds_folder(folder, "c4/en:3.0.1")
    tfds.load("c4/en:3.0.1", data_dir=folder)

Nothing is downloaded. The texts are given, or random sentences of a small vocabulary.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from layerkit.config.checks import check_choice
from layerkit_inputs.base.errors import require_extra

FileFormat = Literal["tfrecord", "array_record"]


class _Format(NamedTuple):
    """Format of a data set."""

    splits: Mapping[str, int]
    """Default number of texts by split."""
    features: Callable[[Any], dict[str, Any]]
    """Function from the module `tfds.features` to the features of an example."""
    example: Callable[[str, str, int], dict[str, Any]]
    """Function from split, text and number to an example."""


def _c4_example(split: str, text: str, number: int) -> dict[str, Any]:
    return {
        "content-length": str(len(text.encode())),
        "content-type": "text/plain",
        "text": text,
        "timestamp": "2019-04-25T12:57:54Z",
        "url": f"https://example.com/{split}/{number}",
    }


def _c4_features(features: Any) -> dict[str, Any]:
    names = ("content-length", "content-type", "text", "timestamp", "url")
    return {name: features.Text() for name in names}


_FORMATS: dict[str, _Format] = {
    "c4/en:3.0.1": _Format(
        splits={"train": 40, "validation": 13}, features=_c4_features, example=_c4_example
    ),
    "super_glue/boolq:1.0.2": _Format(
        splits={"train": 24, "validation": 8},
        features=lambda features: {
            "passage": features.Text(),
            "question": features.Text(),
            "idx": np.int32,
            "label": features.ClassLabel(names=["False", "True"]),
        },
        # Every other passage speaks of a bird, and each question asks whether it does.
        example=lambda split, text, number: {
            "passage": f"{text} and {('a fish', 'a bird')[number % 2]}",
            "question": "is there a bird",
            "idx": number,
            "label": number % 2,
        },
    ),
    # Version 1.0.0 calls the development passages `train`; there is no `validation`.
    "lambada:1.0.0": _Format(
        splits={"train": 12, "test": 13},
        features=lambda features: {"passage": features.Text()},
        example=lambda split, text, number: {"passage": text},
    ),
    # TFDS ships no code for the Pile; folders of it hold the fields of its published records.
    "the_pile:1.0.0": _Format(
        splits={"train": 40, "validation": 8, "test": 8},
        features=lambda features: {
            "text": features.Text(),
            "meta": {"pile_set_name": features.Text()},
        },
        example=lambda split, text, number: {
            "text": text,
            "meta": {"pile_set_name": ("Wikipedia (en)", "Github", "ArXiv")[number % 3]},
        },
    ),
    # The training and held-out data of MLPerf's GPT-3. The latter are ids, here of bytes.
    "c4/en:3.0.4": _Format(splits={"train2": 40}, features=_c4_features, example=_c4_example),
    "c4/en:3.0.5": _Format(
        splits={"validation_tokenized_5662seqs": 13},
        features=lambda features: {"ids": features.Tensor(shape=(None,), dtype=np.int32)},
        example=lambda split, text, number: {
            "ids": np.array([byte + 3 for byte in text.encode()], np.int32)
        },
    ),
}

DATASETS = tuple(_FORMATS)
"""Names of the supported data sets, with configuration and version."""


def write_tfds_folder(
    data_dir: str | os.PathLike[str],
    dataset: str,
    *,
    texts: Mapping[str, Sequence[str]] | None = None,
    num_shards: int = 4,
    file_format: FileFormat = "tfrecord",
) -> pathlib.Path:
    """Write a small data set in the format of a large one.

    Args:
      data_dir: Folder for `tfds.load(..., data_dir=)`, which is created if missing.
      dataset: Name in `DATASETS`.
      texts: Texts by split. None: `sample_texts` for every split.
      num_shards: Number of files of each split.
      file_format: File format. `array_record` has random access without TensorFlow.

    Returns:
      Folder of the files, such as `data_dir/c4/en/3.0.1`.

    Raises:
      ConfigError: The data set is unknown.
    """
    check_choice("write_tfds_folder", DATASETS, dataset=dataset)
    layout = _FORMATS[dataset]
    texts = _texts_of(dataset, layout) if texts is None else texts
    name, _, version = dataset.partition(":")
    name, _, config = name.partition("/")
    folder = pathlib.Path(data_dir, name, config, version)
    tfds = require_extra("tensorflow_datasets", needed_by="write_tfds_folder")
    with _quiet():
        tfds.dataset_builders.store_as_tfds_dataset(
            name=name,
            config=config or None,
            version=version,
            data_dir=os.fspath(data_dir),
            features=tfds.features.FeaturesDict(layout.features(tfds.features)),
            split_datasets={
                split: [
                    (number, layout.example(split, text, number))
                    for number, text in enumerate(split_texts)
                ]
                for split, split_texts in texts.items()
            },
            download_config=tfds.download.DownloadConfig(num_shards=num_shards),
            file_format=file_format,
        )
    return folder


def sample_texts(num_texts: int, *, seed: int = 0) -> list[str]:
    """Return different texts of a few random sentences, which depend only on the seed."""
    random = np.random.Generator(np.random.Philox(key=seed))

    def sentence() -> str:
        words = [random.choice(part) for part in _PARTS_OF_SENTENCE]
        return " ".join(words).capitalize() + "."

    return [
        f"Page {number}. " + " ".join(sentence() for _ in range(random.integers(1, 6)))
        for number in range(num_texts)
    ]


_PARTS_OF_SENTENCE = (
    ("the", "every", "some", "another"),
    ("old", "quick", "silent", "tall", "northern"),
    ("miller", "river", "teacher", "engine", "harbour", "child"),
    ("watches", "follows", "paints", "remembers", "repairs"),
    ("a", "the", "that"),
    ("bridge", "letter", "garden", "clock", "story", "lantern"),
    ("in winter", "at noon", "without a word", "for years", "near the station"),
)


def _texts_of(dataset: str, layout: _Format) -> dict[str, list[str]]:
    return {
        split: sample_texts(num_texts, seed=1 + list(_FORMATS).index(dataset) * 8 + number)
        for number, (split, num_texts) in enumerate(layout.splits.items())
    }


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress log messages and progress bars of TFDS."""
    log = logging.getLogger("absl")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        log.setLevel(level)
