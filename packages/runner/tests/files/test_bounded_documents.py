"""Documents that are small and describe something huge."""

from __future__ import annotations

import pytest

from layerkit_runner.files.bounded_documents import (
    DocumentError,
    parse_json,
    parse_toml,
    read_text,
)


def nested(depth):
    """Documents nested this deep, each with its reader."""
    text, rest = "[" * depth + "]" * depth, "[" * (depth - 1) + "]" * (depth - 1)
    return ((parse_json, text), (parse_toml, f"a = {rest}"))


@pytest.mark.parametrize("depth", [101, pytest.param(900, marks=pytest.mark.slow), 100_000])
def test_deep_nesting_is_an_error_in_each_format(depth):
    for parse, document in nested(depth):
        with pytest.raises(DocumentError, match="deep"):
            parse(document)


def test_nesting_within_the_bound_is_read_in_each_format():
    for parse, document in nested(100):
        assert parse(document)


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (parse_json, "{"),
        (parse_json, f"[{'9' * 5_000}]"),
        (parse_toml, "a = "),
        (parse_toml, f"a = {'9' * 5_000}"),
    ],
)
def test_malformed_document_is_an_error(parse, text):
    with pytest.raises(DocumentError):
        parse(text)


def test_file_beyond_the_bound_is_not_read_whole(tmp_path):
    path = tmp_path / "zeros"
    with path.open("wb") as file:
        file.truncate(10**12)
    with pytest.raises(DocumentError, match="at most 1,000 bytes"):
        read_text(path, max_bytes=1_000)
    path.write_bytes(b"\xff")
    with pytest.raises(DocumentError, match="UTF-8"):
        read_text(path)
