"""Folders in the format of C4, LAMBADA and the Pile, read as the real ones are."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("tensorflow_datasets")

from layerkit_inputs.testing.tfds_folders import DATASETS, sample_texts, write_tfds_folder


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
def test_tfds_and_seqio_read_what_was_written(dataset, split, count, features, tmp_path):
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


def test_given_texts_are_kept_whole_and_in_as_many_files(tmp_path):
    import tensorflow_datasets as tfds

    texts = ["Über Flüsse.", "two\nlines", ""]
    folder = write_tfds_folder(tmp_path, "lambada:1.0.0", texts={"test": texts}, num_shards=3)
    assert len(list(folder.glob("lambada-test.tfrecord-*-of-00003"))) == 3
    loaded = tfds.load("lambada:1.0.0", data_dir=str(tmp_path), split="test").as_numpy_iterator()
    assert sorted(example["passage"].decode() for example in loaded) == sorted(texts)


def test_array_records_give_random_access(tmp_path):
    import tensorflow_datasets as tfds

    pytest.importorskip("array_record")
    folder = write_tfds_folder(tmp_path, "c4/en:3.0.1", file_format="array_record", num_shards=2)
    assert list(folder.glob("c4-train.array_record-*"))
    source = tfds.builder_from_directory(str(folder)).as_data_source(split="train")
    assert len(source) == 40 and source[39]["text"].startswith(b"Page ")


def test_sample_texts_are_the_same_again_and_no_two_alike():
    assert sample_texts(5) == sample_texts(5) != sample_texts(5, seed=1)
    assert len(set(sample_texts(50))) == 50


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            {"dataset": "c4/en"},
            "write_tfds_folder(dataset='c4/en'); did you mean 'c4/en:3.0.1'? Expected one of "
            f"{list(DATASETS)}.",
        ),
        (
            {"dataset": "lambada:1.0.0", "texts": {"tests": ["a"]}},
            "write_tfds_folder: lambada:1.0.0 has no split 'tests'; did you mean 'test'? Expected "
            "some of ['train', 'test'].",
        ),
        (
            {"dataset": "lambada:1.0.0", "texts": {"test": ["a"]}, "num_shards": 2},
            "write_tfds_folder: num_shards=2 for the 1 texts of 'test'; expected at least 1 and at "
            "most one file for each text.",
        ),
    ],
)
def test_what_cannot_be_written_is_refused(arguments, text, tmp_path):
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        write_tfds_folder(tmp_path, **arguments)


def test_a_folder_that_is_there_is_left_alone(tmp_path):
    write_tfds_folder(tmp_path, "lambada:1.0.0", texts={"test": ["a"]}, num_shards=1)
    with pytest.raises(ValueError, match="is there already; remove it"):
        write_tfds_folder(tmp_path, "lambada:1.0.0", texts={"test": ["b"]}, num_shards=1)
