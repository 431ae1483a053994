"""Documents that are small and describe something huge."""

from __future__ import annotations

import pytest

from layerkit_runner.files.bounded_documents import (
    DocumentError,
    parse_json,
    parse_toml,
    parse_yaml,
    read_text,
)

LAUGHS = "a0: &a0 [x]\n" + "".join(
    f"a{level + 1}: &a{level + 1} [{', '.join([f'*a{level}'] * 10)}]\n" for level in range(30)
)
MERGES = "a0: &a0 {k: 1}\n" + "".join(
    f"a{level + 1}: &a{level + 1} {{<<: [*a{level}, *a{level}]}}\n" for level in range(60)
)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (LAUGHS, "aliases"),
        (MERGES, "aliases"),
        ("a: &a [*a]", "alias"),
        ("[" * 5_000 + "]" * 5_000, "deep"),
        ("{a: " * 5_000 + "1" + "}" * 5_000, "deep"),
        (f"a: {'1:' * 100_000}1", "characters"),
        (f"a: 0x{'f' * 100_000}", "characters"),
        ("a: !!python/object/apply:os.system [ls]", "constructor"),
        ("a: *b", "undefined alias"),
    ],
    ids=lambda value: value[:12],
)
def test_yaml_that_exceeds_the_bounds_is_an_error(text, words):
    with pytest.raises(DocumentError, match=words):
        parse_yaml(text)


def test_yaml_alias_and_merge_within_the_bounds_are_read():
    text = "base: &base {a: 1, b: [1, 2]}\nmine: {<<: *base, a: 2}\nagain: [*base, *base]\n"
    base = {"a": 1, "b": [1, 2]}
    assert parse_yaml(text) == {
        "base": base,
        "mine": {"a": 2, "b": [1, 2]},
        "again": [base, base],
    }


@pytest.mark.parametrize("depth", [150, 900, 100_000])
def test_deep_nesting_is_an_error_in_each_format(depth):
    text = "[" * depth + "]" * depth
    for parse, document in ((parse_json, text), (parse_toml, f"a = {text}"), (parse_yaml, text)):
        with pytest.raises(DocumentError, match="deep"):
            parse(document)


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (parse_json, "{"),
        (parse_json, f"[{'9' * 5_000}]"),
        (parse_toml, "a = "),
        (parse_toml, f"a = {'9' * 5_000}"),
        (parse_yaml, "a: ["),
        (parse_yaml, "a: 2026-13-45"),
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
