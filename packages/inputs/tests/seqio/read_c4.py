"""Reads bytes of a folder in the format of C4, also as a program; see test_seqio_input."""

import json
import sys

import seqio
import tensorflow as tf

from layerkit_inputs import Prefetch
from layerkit_inputs.seqio.seqio_input import SeqIOInput


@tf.autograph.experimental.do_not_convert
def as_targets(example):
    return {"targets": example["text"]}


def make_input(folder, **fields):
    task = seqio.Task(
        "c4_bytes",
        source=seqio.TfdsDataSource("c4/en:3.0.1"),
        preprocessors=[
            lambda dataset: dataset.map(as_targets),
            seqio.preprocessors.tokenize,
            seqio.preprocessors.append_eos_after_trim,
        ],
        output_features={"targets": seqio.Feature(seqio.ByteVocabulary(), add_eos=True)},
    )
    return SeqIOInput(
        batch_size=2,
        mixture_or_task=task,
        task_feature_lengths={"targets": 512},
        is_training=True,
        packing_window_rows=4,
        tfds_data_dir=folder,
        **fields,
    )


if __name__ == "__main__":
    folder, state, num_batches = json.loads(sys.argv[1])
    source = make_input(folder)
    source.set_state(state)
    print(json.dumps([source.get_next().ids.tolist() for _ in range(num_batches)]))
    # Both stay open, endless as they are; the process must end all the same.
    ahead = Prefetch(source=make_input(folder))
    ahead.get_next()
