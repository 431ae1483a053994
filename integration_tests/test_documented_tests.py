"""Pages of docs/ agree with the code and the tests that they name."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

import pytest

from layerkit import decoding, layers, models
from layerkit.config import Config, target_of
from layerkit_runner.config import flags
from layerkit_runner.run_options import FLAGS

ROOT = Path(__file__).parents[1]
# The tables after these headings.
PAX = (ROOT / "docs/coming_from_pax.md").read_text().partition("## Tables")[2]
EXPERIMENTS = (ROOT / "docs/pax_experiments.md").read_text().partition("## Compared")[2]
SECURITY = (ROOT / "docs/security.md").read_text().partition("## Files from others")[2]
OF_THE_RUNNER = ROOT / "packages/runner/tests"
TEST = re.compile(r"`([\w/]*\.py)?(?:::(\w+))?`")


PAGES = pytest.mark.parametrize(
    ("page", "fewest"),
    [(EXPERIMENTS, 10), (SECURITY, 20)],
    ids=["experiments", "security"],
)


@PAGES
def test_every_documented_test_exists(page: str, fewest: int):
    named, path = 0, Path()
    for match in TEST.finditer(page):
        if match[1]:
            is_of_root = match[1].startswith(("integration_tests/", "packages/"))
            path = (ROOT if is_of_root else OF_THE_RUNNER) / match[1]
            assert path.is_file(), match[0]
        if match[2]:
            assert f"\ndef {match[2]}(" in path.read_text(), f"{path}: {match[2]}"
            named += 1
    assert named >= fewest


@PAGES
def test_every_row_of_a_documented_table_names_a_test(page: str, fewest: int):
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    assert len(rows) > fewest
    for row in rows:
        is_heading = row.startswith(("| Pax |", "| what is untrusted |"))
        assert is_heading or TEST.search(row.rsplit("|", 2)[1]), row


def test_defaults_of_the_page_on_pax_are_those_of_both_libraries():
    recorded = json.loads((ROOT / "packages/layerkit/tests/praxis/reference.json").read_text())
    rows = PAX.partition("## Defaults")[2].partition("\n## ")[0]
    theirs = dict(re.findall(r"^\| `([\w.]+)=(\w[\w.]*)`", rows, re.M))
    assert theirs == recorded["defaults"]
    ours = re.findall(r"^\| [^|]* \| `(\w+)\.(\w+)=([\w.]+)`", rows, re.M)
    assert len(ours) == len(theirs) + 1
    for owner, field, default in ours:
        module = next(one for one in (layers, models, decoding) if owner in one.__all__)
        value = getattr(getattr(module, owner).HParams.config(), field)
        value = target_of(value).__name__ if isinstance(value, Config) else value
        assert str(value) == default, f"{owner}.{field}"


def test_every_class_of_praxis_has_a_row():
    script = runpy.run_path(str(ROOT / "scripts/praxis_names.py"))
    names = json.loads((ROOT / "integration_tests/praxis_names.json").read_text())
    assert script["find_undocumented"](names, PAX) == []
    without = PAX.replace("`MLPBlock`", "").replace("`quantization.utils`", "")
    missing = script["find_undocumented"](names, without)
    assert missing[0] == "layers.linears.MLPBlock"
    assert set(missing[1:]) == {
        f"layers.quantization.utils.{name}" for name in names["layers.quantization.utils"]
    }


def test_every_documented_flag_and_mode_is_known():
    known = (
        {flag.name for flag in FLAGS} | flags.PAX_FLAGS.keys() | flags.PAX_ANSWERS.keys() | {"fdl"}
    )
    known |= {f"no{name}" for name in known}
    for flag in re.findall(r"--(\w+)", PAX):
        assert flag in known, flag
    for mode in re.findall(r"--mode=(\w+)", PAX):
        assert mode in {mode for row in FLAGS for mode in row.modes}, mode


def test_messages_of_the_troubleshooting_page_are_those_of_the_code():
    page = (ROOT / "docs/troubleshooting.md").read_text()
    table = page.partition("## Errors")[2].partition("\n## ")[0]
    sources = [path.read_text() for path in ROOT.glob("packages/*/src/**/*.py")]
    sources.append((ROOT / "integration_tests/error_messages.md").read_text())
    code = "\n".join(sources)
    quoted = [
        text
        for row in table.splitlines()
        for text in re.findall(r"`([^`]+)`", row[: row.find(" | ", 2)])
    ]
    assert len(quoted) >= 15
    for text in quoted:
        assert text in code, text
