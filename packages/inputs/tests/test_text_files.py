"""Finding and splitting text files."""

from __future__ import annotations

import keyword
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerkit.errors import ConfigError
from layerkit_inputs.text_files import (
    NothingToReadError,
    TextFile,
    find_text_files,
    split_files,
    split_position,
    split_position_of_file,
    standard_library_files,
)


@pytest.fixture
def folder(tmp_path):
    for name in ("b.txt", "a.txt", "sub/c.txt", "sub/d.md", ".hidden", "sub/.git/e.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return tmp_path


def names(files):
    return [file.name for file in files]


def test_a_folder_is_read_through_in_order_without_hidden_files(folder):
    assert names(find_text_files([str(folder)])) == ["a.txt", "b.txt", "sub/c.txt", "sub/d.md"]


def test_patterns_and_files_and_no_file_twice(folder):
    pattern = str(folder / "**/*.txt")
    assert names(find_text_files([pattern])) == ["a.txt", "b.txt", "sub/c.txt"]
    both = [str(folder / "sub/d.md"), pattern, str(folder / "a.txt")]
    assert names(find_text_files(both)) == ["a.txt", "b.txt", "d.md", "sub/c.txt"]


def test_a_relative_pattern_is_read_from_the_working_folder(folder, monkeypatch):
    monkeypatch.chdir(folder)
    assert names(find_text_files(["*/*.txt"])) == ["sub/c.txt"]


def test_path_without_files_raises(raises, tmp_path):
    missing = os.fspath(tmp_path / "none.txt")
    with raises(NothingToReadError, field="paths", value=missing):
        find_text_files([missing])


def test_the_standard_library_is_its_sources_and_topics_without_tests():
    files = standard_library_files()
    assert files == sorted(files)
    found = {file.name: file.path for file in files}
    assert {"keyword.py", "json/decoder.py", "pydoc_data/topics.py"} <= found.keys()
    assert found["keyword.py"].samefile(keyword.__file__)
    for name in found:
        parts = name.split("/")
        assert name.endswith(".py")
        assert not {"test", "tests", "encodings", "site-packages"} & set(parts[:-1])


def make_files(tmp_path, count):
    return [
        TextFile(f"doc{number:04}.txt", tmp_path / f"doc{number:04}") for number in range(count)
    ]


def test_a_split_is_about_its_share_and_loses_nothing(tmp_path):
    files = make_files(tmp_path, 2000)
    train, heldout = split_files(files, heldout_fraction=0.05)
    assert sorted([*train, *heldout]) == files
    assert 60 <= len(heldout) <= 140  # binomial(2000, .05): 100 +- 4 standard deviations
    assert train == sorted(train) and heldout == sorted(heldout)


def test_more_files_or_another_place_move_no_file_to_the_other_split(tmp_path):
    files = make_files(tmp_path, 500)
    train, heldout = split_files(files, heldout_fraction=0.1)
    more_train, more_heldout = split_files(
        [TextFile(f.name, tmp_path / "elsewhere" / f.name) for f in make_files(tmp_path, 900)],
        heldout_fraction=0.1,
    )
    assert set(names(train)) <= set(names(more_train))
    assert set(names(heldout)) <= set(names(more_heldout))


@pytest.mark.parametrize("fraction", [1e-9, 1 - 1e-9])
def test_neither_split_is_empty(tmp_path, fraction):
    train, heldout = split_files(make_files(tmp_path, 3), heldout_fraction=fraction)
    assert train and heldout


@given(st.lists(st.binary(max_size=9), min_size=100), st.floats(0.1, 0.9))
def test_split_of_a_text_begins_with_a_line(lines, fraction):
    text = b"".join(line + b"\n" for line in lines)
    cut = split_position(text, heldout_fraction=fraction)
    train, heldout = text[:cut], text[cut:]
    assert train.endswith(b"\n")
    assert 0 < len(heldout) <= fraction * len(text) + 11


@pytest.mark.parametrize("text", [b"one line", b"title\n" + 1000 * b"x"], ids=["short", "long"])
def test_text_without_lines_raises(raises, text):
    with raises(ConfigError):
        split_position(text, heldout_fraction=0.05)


def test_empty_text_raises(raises, tmp_path):
    (tmp_path / "empty.txt").touch()
    with raises(ConfigError, field="size in bytes", value=0):
        split_position(b"", heldout_fraction=0.05)
    with raises(ConfigError, field="size in bytes", value=0):
        split_position_of_file(tmp_path / "empty.txt", heldout_fraction=0.05)


def test_split_of_a_file_depends_on_its_contents(tmp_path):
    text = b"".join(b"line %d\n" % number for number in range(1000))
    (tmp_path / "text").write_bytes(text)
    for fraction in (0.01, 0.05, 0.5):
        assert split_position_of_file(
            tmp_path / "text", heldout_fraction=fraction
        ) == split_position(text, heldout_fraction=fraction)


def test_about_the_share_of_a_text_is_held_out():
    text = b"".join(b"line %d\n" % number for number in range(1000))
    heldout = text[split_position(text, heldout_fraction=0.1) :]
    assert len(heldout) == pytest.approx(0.1 * len(text), rel=0.02)
