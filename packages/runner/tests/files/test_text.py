"""Sizes with three digits, and tables on terminals and in pipes."""

from __future__ import annotations

import io
import sys

import pytest

from layerkit_runner.files.text import color_text, draw_table, size_text


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (12_345, "12.3 kB"),
        (999_499, "999 kB"),
        (999_600, "1 MB"),
        (1_540_000_000, "1.54 GB"),
        (2_000_000_000_000_000, "2000 TB"),
    ],
)
def test_sizes_are_rounded_to_three_digits(size, text):
    assert size_text(size) == text


ROWS = [("stack/layers_0/w", "float32[18, 3072/fsdp] [bold] :smile: " * 3), ("b", "1")]


def test_table_in_a_pipe_is_plain_and_whole():
    assert draw_table(ROWS, title="weights", head=("name", "shape"), right=[1]) == [
        "weights",
        f"  {'name':16}  {'shape':>{len(ROWS[0][1])}}",
        f"  {ROWS[0][0]}  {ROWS[0][1]}".rstrip(),
        f"  {'b':16}  {'1':>{len(ROWS[0][1])}}",
    ]
    assert draw_table([], title="weights", head=("name", "shape")) == []
    assert draw_table([("\x1b[2J", "x\ny")]) == [r"\x1b[2J  x\ny"]
    assert color_text("bad", "red") == "bad"


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def test_table_on_a_terminal_is_a_box_of_its_width_with_color(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "stdout", Terminal())
    for name, value in {"COLUMNS": "50", "LINES": "9", "TERM": "dumb"}.items():
        monkeypatch.setenv(name, value)
    lines = draw_table(ROWS)
    assert {len(line) for line in lines} == {50} and lines[0].startswith("╭")
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines[1:-2]]
    assert cells[0][0] == ROWS[0][0]
    # A long cell is folded at spaces, and markup and codes of rich are text.
    assert " ".join(cell for _, cell in cells) == ROWS[0][1].strip()
    # A first column that is wide leaves room for the others.
    monkeypatch.setenv("COLUMNS", "30")
    assert len(draw_table(ROWS)) < 20
    # No column has less than ten characters.
    assert draw_table([("lm.Small", "2", "f32", "x")]) == ["lm.Small  2  f32  x"]
    monkeypatch.setenv("TERM", "xterm")
    assert "\x1b[36m" in draw_table(ROWS)[1]
    assert color_text("bad " * 30, "red") == f"\x1b[31m{'bad ' * 30}\x1b[0m"
