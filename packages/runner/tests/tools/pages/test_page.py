"""Pages of HTML: what they contain, what they escape, and their curves in a browser."""

from __future__ import annotations

import hashlib
import json
import re
from importlib.resources import files
from pathlib import Path

import jinja2
import pytest

from layerkit_runner.errors import UsageError
from layerkit_runner.tools.pages import page as pages

VENDOR = files("layerkit_runner.tools.pages") / "vendor"


def curve(label: str, **fields: object) -> dict[str, object]:
    defaults = {"dashed": False, "x": [1, 1, 2], "y": [1, 2, 4], "bad": [], "run": 0}
    return {"label": label, **defaults, **fields}


def chart(*curves: dict[str, object], log: bool = False) -> dict[str, object]:
    return {"title": "Loss", "unit": "nats", "log": log, "curves": curves}


def test_vendored_files_are_those_of_their_readme():
    sums = re.findall(r"`(\S+)` \| (\w{64}) \|", (VENDOR / "README.md").read_text())
    assert len(sums) == 3
    for name, digest in sums:
        assert hashlib.sha256((VENDOR / name).read_bytes()).hexdigest() == digest


def test_title_and_data_are_escaped():
    attack = "</script><script>alert(1)</script>"
    html = pages.render_page("pages/base.html.jinja", title=attack, data={"text": attack})
    assert attack not in html
    data = re.search(r'id="data">(.*?)</script>', html)
    assert data and json.loads(data[1]) == {"text": attack}


def test_number_that_json_lacks_is_rejected():
    with pytest.raises(ValueError, match="not JSON compliant"):
        pages.render_page("pages/base.html.jinja", title="", data=[float("nan")])


def test_missing_name_is_an_error_not_an_empty_text():
    with pytest.raises(jinja2.UndefinedError):
        pages.render_page("pages/base.html.jinja", data=None, title=jinja2.StrictUndefined())


def test_page_is_written_at_once_and_a_folder_is_no_file(tmp_path, raises):
    file = pages.write_page(tmp_path / "new" / "page.html", "<p>")
    assert [Path(file)] == list(Path(file).parent.iterdir())
    with raises(UsageError, field="--html", value=str(tmp_path)):
        pages.write_page(tmp_path, "<p>")


CURVES = """
{% extends "pages/base.html.jinja" %}{% import "pages/drawings.html.jinja" as draw %}
{% block content %}
<input type="checkbox" checked data-run="0"><div class="grid">
{% for name, chart in data.charts.items() %}{{ draw.curves(name, chart) }}{% endfor %}</div>
{{ draw.stacked_bars([{"label": "a", "note": "7 s", "parts": [
  {"color": 0, "value": 3.0, "text": "step 3 s"}, {"color": 1, "value": 4.0, "text": "input 4 s"}
]}], 8.0, limit=6.0) }}
{% endblock %}
"""


@pytest.mark.parametrize(("width", "dark"), [(1400, False), (400, False), (1400, True)])
def test_curves_are_drawn_linked_and_zoomed_in_browser(open_page, tmp_path, width, dark):
    data = {
        "charts": {
            "loss": chart(curve("a"), curve("b", x=[2, 8], y=[None, 3], bad=[2], run=1)),
            "rate": chart(curve("a", y=[1e-6, 0, 3e-5]), log=True),
        }
    }
    template = pages._templates().from_string(CURVES)
    file = tmp_path / "page.html"
    file.write_text(template.render(title="Curves", data=data))
    page = open_page(file, width=width, dark=dark)
    plots = "[...document.querySelectorAll('figure')].map((figure) => figure.plot)"
    # x is the union of the curves' steps; a gap stays null, a step of another curve is undefined.
    assert page.evaluate(f"{plots}[0].data[0]") == [1, 2, 4, 10]
    assert page.evaluate(f"{plots}.map((plot) => plot.scales.x.max)") == [10, 10]
    drawn = "[...{}.ctx.getImageData(0, 0, 500, 200).data].some((value) => value > 0)"
    assert all(page.evaluate(drawn.format(f"{plots}[{i}]")) for i in range(2))

    over = page.locator(".u-over").first
    over.scroll_into_view_if_needed()
    box = over.bounding_box()
    left, middle = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    page.mouse.move(left, middle)
    page.mouse.down()
    page.mouse.move(left + box["width"] / 4, middle)
    page.mouse.up()
    ranges = page.evaluate(f"{plots}.map((plot) => [plot.scales.x.min, plot.scales.x.max])")
    assert ranges[0] == ranges[1] == pytest.approx([5.5, 7.75], abs=0.1)
    assert page.locator(".u-legend").nth(1).inner_text() == "step4a3e-5"  # linked
    page.mouse.dblclick(left, middle)
    assert page.evaluate(f"{plots}[1].scales.x.min") == 1

    page.locator("figure button").first.click()
    assert page.evaluate(f"{plots}[0].scales.y.distr") == 3
    page.locator("input").uncheck()
    shown = page.evaluate(f"{plots}[0].series.map((series) => series.show)")
    assert shown == [True, False, True]
