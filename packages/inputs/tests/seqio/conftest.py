"""Small SeqIO tasks: of given examples, and of a folder in the format of C4."""

from __future__ import annotations

import pytest

pytest.importorskip("seqio")


@pytest.fixture(scope="session")
def c4_folder(tmp_path_factory):
    """Write 40 texts in 4 files of `train`, and 13 in 4 files of `validation`."""
    from layerkit_inputs.testing.tfds_folders import write_tfds_folder

    folder = tmp_path_factory.mktemp("tfds")
    write_tfds_folder(folder, "c4/en:3.0.1")
    return folder


@pytest.fixture(scope="session")
def make_task():
    """Return a function that makes a task of examples, dictionaries of lists of ids."""
    import seqio
    import tensorflow as tf

    def make(examples, *, name="task", splits=("train", "validation"), add_eos=False, **fields):
        features = list(examples[0]) if examples else ["targets"]
        columns = {
            feature: tf.ragged.constant(
                [example[feature] for example in examples], dtype=tf.int32, ragged_rank=1
            )
            for feature in features
        }
        vocabulary = seqio.PassThroughVocabulary(size=100, eos_id=1)
        fields.setdefault(
            "preprocessors", [seqio.preprocessors.append_eos_after_trim] if add_eos else []
        )

        @tf.autograph.experimental.do_not_convert
        def as_dense(example):
            return {feature: tf.identity(ids) for feature, ids in example.items()}

        def dataset_fn(split, shuffle_files, seed=None):
            return tf.data.Dataset.from_tensor_slices(columns).map(as_dense)

        return seqio.Task(
            name,
            source=seqio.FunctionDataSource(dataset_fn, splits=splits),
            output_features={
                feature: seqio.Feature(vocabulary, add_eos=add_eos) for feature in features
            },
            **fields,
        )

    return make


@pytest.fixture(scope="session")
def c4_task():
    """Return a function that makes a task over a C4 folder: bytes of the text and EOS 1."""
    import seqio
    import tensorflow as tf

    @tf.autograph.experimental.do_not_convert
    def as_targets(example):
        return {"targets": example["text"]}

    def make(data_dir=None, *, name="c4_bytes", **fields):
        return seqio.Task(
            name,
            source=seqio.TfdsDataSource("c4/en:3.0.1", tfds_data_dir=data_dir and str(data_dir)),
            preprocessors=[
                lambda dataset: dataset.map(as_targets),
                seqio.preprocessors.tokenize,
                seqio.preprocessors.append_eos_after_trim,
            ],
            output_features={"targets": seqio.Feature(seqio.ByteVocabulary(), add_eos=True)},
            **fields,
        )

    return make
