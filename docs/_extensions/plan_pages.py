"""Sphinx extension that draws the plans stored in `docs/results/plan_*.json` as pages.

Such a file is the output of `--mode=plan --json`; its page is what `--html` writes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

from layerkit_runner.tools.plan.pictures import plan_html, read_plan

BACK = '<p><a href="../index.html">layerkit documentation</a></p>'


def setup(app: Sphinx) -> dict[str, Any]:
    """Write the pages after the others."""
    app.connect("build-finished", write_plans)
    return {"parallel_read_safe": True}


def write_plans(app: Sphinx, exception: Exception | None) -> None:
    """Write the page of each stored plan to `results/`, beside where its file lies in docs."""
    if exception is None and app.builder.format == "html":
        folder = Path(app.outdir) / "results"
        folder.mkdir(exist_ok=True)
        for file in sorted(Path(app.srcdir).glob("results/plan_*.json")):
            plan = read_plan(str(file))
            page = plan_html({plan.target: plan}).replace("<header>", f"<header>{BACK}", 1)
            (folder / f"{file.stem}.html").write_text(page)
