"""Contests with plain SeqIO: a task's data set and feature converter, batches as NumPy arrays.

The rival does the same as `seqio.get_dataset`, without its in-memory cache for small data.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import seqio

from input_rivals.contest import BATCH_SIZE, LENGTH, SHUFFLED, Batch, Contest, texts
from layerkit_inputs.seqio.seqio_input import SeqIOInput
from layerkit_inputs.testing.tfds_folders import write_tfds_folder

CHARACTERS = 120
"""Length of a text, so that several fit in a row."""
EXAMPLES = 10_000
_RENAMED = {
    "decoder_input_tokens": "ids",
    "decoder_target_tokens": "labels",
    "decoder_loss_weights": "weights",
}
_RENAMED_PACKED = {
    **_RENAMED,
    "decoder_segment_ids": "segment_ids",
    "decoder_positions": "segment_pos",
}


def _task(folder: Path) -> seqio.Task:
    """Write a folder in the format of C4 and return its byte-level task."""
    write_tfds_folder(
        folder, "c4/en:3.0.1", texts={"train": texts(CHARACTERS)[:EXAMPLES]}, num_shards=8
    )
    return seqio.Task(
        "bytes_of_texts",
        source=seqio.TfdsDataSource("c4/en:3.0.1", tfds_data_dir=str(folder)),
        preprocessors=[
            lambda dataset: dataset.map(lambda example: {"targets": example["text"]}),
            seqio.preprocessors.tokenize,
            seqio.preprocessors.append_eos_after_trim,
        ],
        output_features={"targets": seqio.Feature(seqio.ByteVocabulary(), add_eos=True)},
        shuffle_buffer_size=SHUFFLED,
    )


def _contest(folder: Path, *, pack: bool) -> Contest:
    task, lengths = _task(folder), {"targets": LENGTH}

    def bare() -> Iterator[Batch]:
        dataset = task.get_dataset(
            lengths, "train", shuffle=True, seed=0, num_epochs=None, try_in_mem_cache=False
        )
        dataset = seqio.LMFeatureConverter(pack=pack)(dataset, task_feature_lengths=lengths)
        return dataset.batch(BATCH_SIZE, drop_remainder=True).as_numpy_iterator()

    config = SeqIOInput.HParams.config(
        mixture_or_task=task,
        task_feature_lengths=lengths,
        use_packing=pack,
        batch_size=BATCH_SIZE,
        is_training=True,
    )
    renamed = _RENAMED_PACKED if pack else _RENAMED
    return Contest(config.Instantiate, bare, least_batches=64, renamed=renamed)


def packed(folder: Path) -> Contest:
    """Compare packed rows of several examples."""
    return _contest(folder, pack=True)


def unpacked(folder: Path) -> Contest:
    """Compare rows of one example each."""
    return _contest(folder, pack=False)
