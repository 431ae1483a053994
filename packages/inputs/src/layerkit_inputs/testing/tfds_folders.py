"""Small TensorFlow Datasets folders in the format of large data sets, for tests.

Code that reads C4 needs C4, which is 300 GB. `write_tfds_folder` writes a folder with the same
name, version, features, splits and file layout, and a few dozen texts. `tfds.load` and
`seqio.TfdsDataSource` read it like the original:

    write_tfds_folder(folder, "c4/en:3.0.1")
    tfds.load("c4/en:3.0.1", data_dir=folder)

Nothing is downloaded. The texts are given, or random sentences of a small vocabulary.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from layerkit.config.checks import check_choice
from layerkit_inputs.base.errors import require_extra


class _Format(NamedTuple):
    """Format of a data set."""

    splits: Mapping[str, int]
    """Default number of texts by split."""
    example: Callable[[str, str, int], dict[str, Any]]
    """Function from split, text and number to an example, whose values determine the features."""


def _c4_example(split: str, text: str, number: int) -> dict[str, Any]:
    return {
        "content-length": str(len(text.encode())),
        "content-type": "text/plain",
        "text": text,
        "timestamp": "2019-04-25T12:57:54Z",
        "url": f"https://example.com/{split}/{number}",
    }


_FORMATS: dict[str, _Format] = {
    "c4/en:3.0.1": _Format({"train": 40, "validation": 13}, _c4_example),
    "super_glue/boolq:1.0.2": _Format(
        {"train": 24, "validation": 8},
        # Every other passage speaks of a bird, and each question asks whether it does.
        lambda split, text, number: {
            "passage": f"{text} and {('a fish', 'a bird')[number % 2]}",
            "question": "is there a bird",
            "idx": np.int32(number),
            "label": np.int64(number % 2),
        },
    ),
    # Version 1.0.0 calls the development passages `train`; there is no `validation`.
    "lambada:1.0.0": _Format(
        {"train": 12, "test": 13}, lambda split, text, number: {"passage": text}
    ),
    # TFDS ships no code for the Pile; folders of it hold the fields of its published records.
    "the_pile:1.0.0": _Format(
        {"train": 40, "validation": 8, "test": 8},
        lambda split, text, number: {
            "text": text,
            "meta": {"pile_set_name": ("Wikipedia (en)", "Github", "ArXiv")[number % 3]},
        },
    ),
    # The training and held-out data of MLPerf's GPT-3. The latter are ids, here of bytes.
    "c4/en:3.0.4": _Format({"train2": 40}, _c4_example),
    "c4/en:3.0.5": _Format(
        {"validation_tokenized_5662seqs": 13},
        lambda split, text, number: {
            "ids": np.array([byte + 3 for byte in text.encode()], np.int32)
        },
    ),
}


def write_tfds_folder(
    data_dir: str | os.PathLike[str],
    dataset: str,
    *,
    texts: Mapping[str, Sequence[str]] | None = None,
    num_shards: int = 4,
) -> pathlib.Path:
    """Write a small data set in the format of a large one.

    Args:
      data_dir: Folder for `tfds.load(..., data_dir=)`, which is created if missing.
      dataset: Name of a supported data set, with configuration and version.
      texts: Texts by split. None: `sample_texts` for every split.
      num_shards: Number of files of each split.

    Returns:
      Folder of the files, such as `data_dir/c4/en/3.0.1`.

    Raises:
      ConfigError: The data set is unknown.
    """
    check_choice("write_tfds_folder", _FORMATS, dataset=dataset)
    layout = _FORMATS[dataset]
    seed = 1 + list(_FORMATS).index(dataset) * 8
    texts = texts or {
        split: sample_texts(count, seed=seed + number)
        for number, (split, count) in enumerate(layout.splits.items())
    }
    name, _, version = dataset.partition(":")
    name, _, config = name.partition("/")
    tfds = require_extra("tensorflow_datasets", needed_by="write_tfds_folder")
    tfds.disable_progress_bar()
    tfds.dataset_builders.store_as_tfds_dataset(
        name=name,
        config=config or None,
        version=version,
        data_dir=os.fspath(data_dir),
        features=tfds.features.FeaturesDict(_features(tfds, layout.example("", "", 0))),
        split_datasets={
            split: [
                (number, layout.example(split, text, number))
                for number, text in enumerate(split_texts)
            ]
            for split, split_texts in texts.items()
        },
        download_config=tfds.download.DownloadConfig(num_shards=num_shards),
        file_format="tfrecord",
    )
    return pathlib.Path(data_dir, name, config, version)


def _features(tfds: Any, example: Mapping[str, Any]) -> dict[str, Any]:
    """Return the features of examples of text, scalars, arrays of one dimension, and mappings."""
    return {
        name: tfds.features.Text()
        if isinstance(value, str)
        else _features(tfds, value)
        if isinstance(value, dict)
        else tfds.features.Tensor(shape=(None,) * value.ndim, dtype=value.dtype)
        for name, value in example.items()
    }


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
