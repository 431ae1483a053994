"""Finding text files."""

from __future__ import annotations

import keyword
import os

import pytest

from layerkit_inputs.base.errors import MissingFileError
from layerkit_inputs.base.find_files import find_text_files, standard_library_files


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


def test_path_without_files_raises(raises, tmp_path):
    missing = os.fspath(tmp_path / "none.txt")
    with raises(MissingFileError, field="paths", value=missing):
        find_text_files([missing])
    with raises(MissingFileError, field="paths", value=[]):
        find_text_files([])


def test_the_standard_library_is_its_sources_and_topics_without_tests():
    files = standard_library_files()
    assert files == sorted(files)
    result = {file.name: file.path for file in files}
    assert {"keyword.py", "json/decoder.py", "pydoc_data/topics.py"} <= result.keys()
    assert result["keyword.py"].samefile(keyword.__file__)
    for name in result:
        parts = name.split("/")
        assert name.endswith(".py")
        assert not {"test", "tests", "encodings", "site-packages"} & set(parts[:-1])
