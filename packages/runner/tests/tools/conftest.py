"""A Chromium that opens pages and fails for errors and for requests to elsewhere."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium")


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """Yield the system's Chromium, driven by playwright; skip where one of them is missing."""
    playwright = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("chromium is not installed")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(chromium: Any, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Yield a function that opens a file of HTML and returns playwright's page.

    The test fails at its end for messages of the level error, exceptions of scripts, and requests
    to any other address. Each page has a screenshot beside the file while the test runs.
    """
    problems: list[str] = []

    def open_file(file: Path, *, width: int = 1400, dark: bool = False) -> Any:
        scheme = "dark" if dark else "light"
        page = chromium.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        page.on("pageerror", lambda error: problems.append(f"exception: {error}"))
        page.on("console", lambda line: line.type == "error" and problems.append(line.text))
        page.on("request", lambda request: addresses.append(request.url))
        addresses: list[str] = []
        page.goto(file.as_uri())
        page.screenshot(path=file.with_suffix(f".{width}.{scheme}.png"), full_page=True)
        problems.extend(url for url in addresses if url not in (file.as_uri(), "data:,"))
        is_wide = "document.documentElement.scrollWidth > document.documentElement.clientWidth"
        if page.evaluate(is_wide):
            problems.append(f"{file.name} is wider than {width} pixels")
        return page

    yield open_file
    for context in chromium.contexts:
        context.close()
    assert problems == []
