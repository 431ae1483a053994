"""docs/coming_from_pax.md names a test or flag for each of its rows: they are all there."""

from __future__ import annotations

import re
from pathlib import Path

from layerkit_runner.command_line.flag_table import FLAGS, MODES, OTHER_NAMES, PAX_ANSWERS

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/coming_from_pax.md").read_text()
OF_THE_RUNNER = ROOT / "packages/runner/tests"
TEST = re.compile(r"`([\w/]*\.py)?(?:::(\w+))?`")


def test_every_test_exists():
    named, path = 0, Path()
    for found in TEST.finditer(PAGE):
        if found[1]:
            is_of_root = found[1].startswith("integration_tests/")
            path = (ROOT if is_of_root else OF_THE_RUNNER) / found[1]
            assert path.is_file(), found[0]
        if found[2]:
            assert f"\ndef {found[2]}(" in path.read_text(), f"{path}: {found[2]}"
            named += 1
    assert named > 80


def test_every_row_shows_one():
    rows = [line for line in PAGE.splitlines() if line.startswith("| ")]
    assert len(rows) > 60
    for row in rows:
        assert row.startswith("| Pax |") or TEST.search(row.rsplit("|", 2)[1]), row


def test_every_flag_is_known():
    known = {flag.name for flag in FLAGS} | OTHER_NAMES.keys() | PAX_ANSWERS.keys() | {"fdl"}
    known |= {f"no{name}" for name in known}
    for flag in re.findall(r"--(\w+)", PAGE):
        assert flag in known, flag
    for mode in re.findall(r"--mode=(\w+)", PAGE):
        assert mode in MODES, mode
