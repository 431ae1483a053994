"""`--inspect=parameters` as a process that sees no accelerator."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXPERIMENTS = Path(__file__).parent.parent / "plan"


def inspected(folder: Path, *flags: str) -> dict[str, Any]:
    """Return the JSON output of the command."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "layerkit_runner.cli", "--exp=small_lm_experiment.SmallLm"),
            *("--mode=inspect", "--inspect=parameters", "--json", "--fdl.MESH=[2,4,2]"),
            *flags,
        ],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{EXPERIMENTS}:{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


@pytest.mark.slow  # one such process is in plan/test_command.py
def test_table_of_weights_has_axes_shapes_and_sharding(tmp_path: Path):
    table = inspected(tmp_path)
    assert list(tmp_path.iterdir()) == []
    # The number of devices is independent of the 8 in the environment of the tests.
    assert (table["num_devices"], table["mesh"]["fsdp"]) == (16, 4)
    assert table["totals"]["weights"]["count"] == sum(row["count"] for row in table["parameters"])
    [query] = [row for row in table["parameters"] if row["path"].endswith("query/w")]
    assert query["axes"] == ["layers", "embed", "heads", "head_dim"]
    assert query["shape"] == [3, 16, 2, 8]
    assert query["sharding"] == [[], ["fsdp"], ["tensor"], []]
    assert query["bytes_per_device"] == 3 * 16 * 16 * 4 // 8


def test_page_of_weights_has_their_axes_and_rectangles_in_browser(open_page, tmp_path: Path):
    file = tmp_path / "weights.html"
    table = inspected(tmp_path, f"--html={file}")
    page = open_page(file, width=400)
    rows = page.locator("table:has(td.share) tbody tr")
    assert rows.count() == len(table["parameters"])
    [query] = [text for text in rows.all_inner_texts() if "query/w" in text]
    assert "layers 3 × embed 16/fsdp × heads 2/tensor × head_dim 8" in query
    # Split over fsdp 4 and tensor 2, each part on the two devices of the axis data.
    drawing = page.locator(
        "figure", has_text="attention/key/w: 8 rectangle(s), each on 2 device(s)"
    )
    assert drawing.locator("rect").count() == 8
    assert (
        drawing.locator("title").first.text_content().startswith("devices 0, 8; layers 3: 0 to 2")
    )
