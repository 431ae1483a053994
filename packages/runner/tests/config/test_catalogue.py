"""Catalogues of experiments: files of facts that otherwise require building the model."""

from __future__ import annotations

from pathlib import Path

import pytest

from layerkit_runner.config.catalogue import (
    FILE_NAME,
    CatalogueLine,
    catalogue_file_text,
    catalogue_text,
    read_catalogue,
    short_count,
)
from layerkit_runner.config.registry import ExperimentEntry
from layerkit_runner.errors import UsageError

SUMMARY = "A model of which much can be said, and all of it in one long sentence like this."
LINES = {
    "lm.B": CatalogueLine(2, "data 2 × fsdp 4", "C4", SUMMARY, ("lm", "moe")),
    "lm.A": CatalogueLine(1, "one device", "made-up tokens", SUMMARY),
    "lm.C": CatalogueLine(None, "one device", "your own text", SUMMARY),
}
ENTRIES = [ExperimentEntry(name, f"acme.{name}", line) for name, line in LINES.items()]


def test_written_record_is_read_back(tmp_path: Path):
    assert read_catalogue(tmp_path) is None
    text = catalogue_file_text(LINES)
    assert text.splitlines()[2] == (
        '  "lm.B": {"num_params": 2, "mesh": "data 2 × fsdp 4", "data": "C4",'
        f' "summary": "{SUMMARY}",'
        ' "tags": ["lm", "moe"]},'
    )
    (tmp_path / FILE_NAME).write_text(text, encoding="utf-8")
    assert read_catalogue(tmp_path) == LINES


@pytest.mark.parametrize(
    "content", [b"{", b"[]", b'{"lm.A": {"x": 1, "tags": []}}', b'{"lm.A": 1}', b'{"\xff": 1}']
)
def test_invalid_catalogue_file_is_an_error(raises, content: bytes, tmp_path: Path):
    (tmp_path / FILE_NAME).write_bytes(content)
    with raises(UsageError, owner=f"{tmp_path}/catalogue.json"):
        read_catalogue(tmp_path)


def test_counts_are_abbreviated():
    counts = (7, 999, 1000, 12_345, 999_499, 999_500, 99_949_999, 1_104_652_800, 1.2e12)
    words = ["7", "999", "1.00K", "12.3K", "999K", "1.00M", "99.9M", "1.10B", "1200B"]
    assert [short_count(int(count)) for count in counts] == words


@pytest.mark.parametrize("width", [40, 80, 200])
def test_a_listing_has_headings_and_fits_the_terminal(width: int):
    heading, *lines = catalogue_text(ENTRIES, width=width).splitlines()
    assert heading.split()[0] == "NAME"
    assert max(map(len, [heading, *lines])) <= width
    assert [line.split()[0] for line in lines] == list(LINES)
    assert all(SUMMARY in line for line in lines) == (width == 200)


def test_a_listing_for_a_program_shows_all_and_no_headings():
    lines = catalogue_text(ENTRIES).splitlines()
    assert [line.split()[0] for line in lines] == list(LINES)
    assert all(line.endswith(SUMMARY) for line in lines)
