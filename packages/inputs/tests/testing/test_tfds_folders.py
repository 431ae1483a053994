from __future__ import annotations

import pytest

pytest.importorskip("tensorflow_datasets")

from layerkit_inputs.testing.tfds_folders import sample_texts, write_tfds_folder


@pytest.mark.parametrize(
    ("dataset", "split", "count", "features"),
    [
        (
            "c4/en:3.0.1",
            "train",
            40,
            {"content-length", "content-type", "text", "timestamp", "url"},
        ),
        ("lambada:1.0.0", "test", 13, {"passage"}),
        ("the_pile:1.0.0", "validation", 8, {"text", "meta"}),
    ],
)
def test_tfds_and_seqio_read_a_written_folder(dataset, split, count, features, tmp_path):
    seqio = pytest.importorskip("seqio")
    import tensorflow_datasets as tfds

    folder = write_tfds_folder(tmp_path, dataset)
    name, version = dataset.split(":")
    assert folder == tmp_path / name / version
    examples = list(tfds.load(dataset, data_dir=str(tmp_path), split=split).as_numpy_iterator())
    assert len(examples) == count and set(examples[0]) == features
    source = seqio.TfdsDataSource(dataset, tfds_data_dir=str(tmp_path))
    assert len(source.list_shards(split)) == 4 and source.num_input_examples(split) == count
    assert sum(1 for _ in source.get_dataset(split, shuffle=False)) == count


def test_given_texts_are_written_to_the_number_of_shards(tmp_path):
    import tensorflow_datasets as tfds

    texts = ["Über Flüsse.", "two\nlines", ""]
    folder = write_tfds_folder(tmp_path, "lambada:1.0.0", texts={"test": texts}, num_shards=3)
    assert len(list(folder.glob("lambada-test.tfrecord-*-of-00003"))) == 3
    loaded = tfds.load("lambada:1.0.0", data_dir=str(tmp_path), split="test").as_numpy_iterator()
    assert sorted(example["passage"].decode() for example in loaded) == sorted(texts)


def test_sample_texts_are_deterministic_and_different():
    assert sample_texts(5) == sample_texts(5) != sample_texts(5, seed=1)
    assert len(set(sample_texts(50))) == 50
