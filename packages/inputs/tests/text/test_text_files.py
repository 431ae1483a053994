"""Splitting text files and documents into training and held-out text."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerkit.errors import ConfigError
from layerkit_inputs.base.find_files import find_text_files
from layerkit_inputs.text.text_files import (
    heldout_limit,
    named_split,
    share_of,
    split_by_names,
    split_pieces,
    split_position,
)


@pytest.mark.parametrize(
    ("split", "paths"),
    [
        ("train", ["train.jsonl", "data/train-00000-of-00002.parquet", "wiki.train.tokens"]),
        ("train", ["TRAIN_1.txt", "training/part-3.txt.gz", "trainset.csv", "test/train.txt"]),
        (
            "validation",
            ["val.jsonl", "valid.txt", "my-validation-00000-of-00001.parquet", "x.valid.txt"],
        ),
        (
            "validation",
            [
                "dev/a.txt",
                "eval2.jsonl.gz",
                "held_out.txt",
                "heldout/x",
                "hold-out.md",
                "holdout/y",
            ],
        ),
        ("test", ["test.txt", "wiki.test.tokens", "x/test-00000-of-00001.parquet", "testset.txt"]),
        (None, ["a.txt", "trains.txt", "interval.txt", "latest.txt", "devil.md", "contest/b.txt"]),
        (None, ["train_val.jsonl", "evaluate.py", "strain.txt", "tests.txt"]),
    ],
)
def test_split_of_a_path_is_named_by_a_whole_word_of_its_last_part(split, paths):
    assert {path: named_split(path) for path in paths} == dict.fromkeys(paths, split)


def test_names_of_splits_are_those_of_hugging_face_data_sets(tmp_path):
    data_files = pytest.importorskip("datasets.data_files")
    names = [
        f"{folder}{word}{rest}"
        for word in ("train", "training", "validation", "valid", "dev", "val", "test", "testing")
        for folder, rest in (
            ("", ".txt"),
            ("", "-00000-of-00002.txt"),
            ("a.", ".txt"),
            ("x-", "_1.txt"),
        )
    ]
    for name in names:
        (tmp_path / name).touch()
    patterns = data_files.get_data_patterns(str(tmp_path))
    theirs = {
        path.rpartition("/")[2]: str(split)
        for split, paths in data_files.DataFilesDict.from_patterns(patterns, str(tmp_path)).items()
        for path in paths
    }
    assert theirs == {name: named_split(name) for name in names}


def tree(folder, names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    return {
        split: [file.path.relative_to(folder).as_posix() for file in files]
        for split, files in (split_by_names(find_text_files([str(folder)])) or {}).items()
    }


def test_files_are_split_by_names_below_their_common_folder(tmp_path):
    # The folder's own name does not count.
    assert tree(tmp_path / "test" / "plain", ["a.txt", "b.txt"]) == {}
    assert tree(tmp_path / "one", ["train.txt", "notes.txt"]) == {}
    result = tree(tmp_path / "test" / "two", ["train/a.txt", "val/a.txt", "more.txt"])
    assert result["train"] == ["more.txt", "train/a.txt"] and result["heldout"] == ["val/a.txt"]
    result = tree(tmp_path / "three", ["train.txt", "valid.txt", "test.txt"])
    assert result["heldout"] == ["valid.txt"] and result["test"] == ["test.txt"]
    assert tree(tmp_path / "four", ["a.txt", "test.txt"])["heldout"] == ["test.txt"]


def pieces_of(folder, contents, fraction):
    folder.mkdir()
    for number, text in enumerate(contents):
        (folder / f"{number:04}.txt").write_bytes(text)
    files = find_text_files([str(folder)])
    train, heldout = split_pieces(files, heldout_fraction=fraction)
    return [piece.read() for piece in train], [piece.read() for piece in heldout]


def test_many_files_are_split_by_a_hash_of_their_text(tmp_path):
    texts = [b"text %d" % number for number in range(400)]
    train, heldout = pieces_of(tmp_path / "one", texts, 0.1)
    shares = [int.from_bytes(hashlib.blake2b(t, digest_size=8).digest(), "big") for t in texts]
    assert heldout == [t for t, share in zip(texts, shares, strict=True) if share < 0.1 * 2**64]
    assert sorted(train + heldout) == sorted(texts) and 16 <= len(heldout) <= 64
    # Other files, other names and copies move no text to the other split.
    more_train, more_heldout = pieces_of(tmp_path / "two", [b"new", *texts[::-1], *texts[:50]], 0.1)
    assert set(train) <= set(more_train) and set(heldout) <= set(more_heldout)
    assert not set(more_train) & set(more_heldout)


def test_the_ends_of_a_few_files_are_held_out(tmp_path):
    texts = [b"".join(b"%d line %d\n" % (n, i) for i in range(200)) for n in range(3)]
    train, heldout = pieces_of(tmp_path / "one", [*texts, b"without lines"], 0.05)
    assert [a + b for a, b in zip(train, heldout, strict=False)] == texts
    assert train[3] == b"without lines"
    for text, end in zip(texts, heldout, strict=True):
        assert len(end) == pytest.approx(0.05 * len(text), rel=0.1)
        assert end.startswith(b"%d line" % texts.index(text))


def test_a_file_without_lines_cannot_be_split(raises, tmp_path):
    with raises(ConfigError, owner=str(tmp_path / "one" / "0000.txt")):
        pieces_of(tmp_path / "one", [b"all in one line"], 0.05)
    with raises(ConfigError, owner=None):
        pieces_of(tmp_path / "two", [b"same", b"same"], 0.05)


@pytest.mark.parametrize("fraction", [1e-9, 0.3, 1 - 1e-9])
def test_neither_split_is_empty(fraction):
    shares = [share_of(b"%d" % number) for number in range(9)]
    limit = heldout_limit(shares, fraction=fraction)
    held_out = [share for share in shares if share < limit]
    assert len(held_out) == {1e-9: 1, 1 - 1e-9: 8}.get(
        fraction, len([s for s in shares if s < 0.3])
    )


@given(st.lists(st.binary(max_size=9), min_size=100), st.floats(0.1, 0.9))
def test_split_of_a_text_begins_with_a_line(lines, fraction):
    text = b"".join(line + b"\n" for line in lines)
    cut = split_position(text, heldout_fraction=fraction)
    assert text[:cut].endswith(b"\n")
    assert 0 < len(text[cut:]) <= fraction * len(text) + 11
