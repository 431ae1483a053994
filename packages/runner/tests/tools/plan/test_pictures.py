"""Pages of plans: their figures, compared with the plan, and the page in a browser."""

from __future__ import annotations

import dataclasses
import json
import re

import numpy as np
import pytest

from layerkit_runner.errors import UsageError
from layerkit_runner.files.text import size_text
from layerkit_runner.tools.plan.bounds import layer_flops
from layerkit_runner.tools.plan.hardware import device_kind
from layerkit_runner.tools.plan.memory import Memory
from layerkit_runner.tools.plan.page import verdict
from layerkit_runner.tools.plan.pictures import _view, memory_parts, plan_html, read_plan


@pytest.fixture
def stored(planned, tmp_path):
    """Return a file with the JSON form of a plan."""
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(dataclasses.asdict(planned.plan)))
    return file


def test_plan_of_a_json_file_is_the_plan(planned, stored):
    assert read_plan(str(stored)) == planned.plan


@pytest.mark.parametrize(
    "text",
    ["", "[1]", "{}", '{"experiment": "a"}', pytest.param("[" * 100_000, id="deep")],
)
def test_file_without_a_plan_raises(tmp_path, raises, text):
    (tmp_path / "a.json").write_text(text)
    with raises(UsageError, field="--compare", value=f"{tmp_path}/a.json"):
        read_plan(f"{tmp_path}/a.json")
    with raises(UsageError, field="--compare"):
        read_plan(f"{tmp_path}/missing.json")


@pytest.mark.parametrize(
    "changed",
    [
        {"mesh": {"data": 10**9, "fsdp": 10**9}},
        {"memory": {"peak": "much"}},
        {"versions": {}},
        {"live": {"bytes": [], "backward": [], "largest": []}},
    ],
    ids=str,
)
def test_plan_that_no_page_can_show_raises(stored, raises, changed):
    stored.write_text(json.dumps(json.loads(stored.read_text()) | changed))
    with raises(UsageError, field="--compare", value=str(stored)):
        read_plan(str(stored))


def test_figures_of_the_page_are_those_of_the_plan(planned):
    plan = planned.plan
    view = _view("a", plan)
    assert sum(part["value"] for part in view["memory"]["parts"]) == plan.memory.peak
    assert sum(memory_parts(plan).values()) == plan.memory.peak
    flops = sum(part["value"] for row in view["flops"] for part in row["parts"])
    assert flops == pytest.approx(plan.bounds.work.flops)
    weights = [tensor for tensor in plan.tensors if tensor.kind == "weights"]
    assert sum(size for _, size, *_ in view["weights"]["rows"]) == plan.memory.weights
    assert sum(size for _, size, *_ in view["weights"]["rows"]) == sum(
        tensor.bytes_per_device for tensor in weights
    )
    rows = {device: position for row in view["hosts"].values() for device, position in row}
    grid = np.reshape(plan.placement.devices, [*plan.mesh.values()])
    assert all(grid[position] == device for device, position in rows.items())
    assert len(rows) == plan.num_devices
    html = plan_html({"a": plan})
    cells = re.findall(r"%, transparent\)\">([^<]*)</td>", html)
    assert sorted(cells) == sorted(
        f"{size_text(traffic.bytes_sent)} in {traffic.executions:,}" for traffic in plan.collectives
    )
    texts = {text for tensor in weights for text in re.findall(r"\w+$", tensor.path)}
    assert all(text in html for text in texts)


def test_inputs_that_the_step_does_not_read_take_no_part_in_the_peak(plan_of):
    plan = plan_of("spmd").plan
    sizes = {field.name: 0 for field in dataclasses.fields(Memory)}
    memory = Memory(**{**sizes, "weights": 70, "batch": 10, "arguments": 50, "peak": 50})
    parts = memory_parts(dataclasses.replace(plan, memory=memory))
    assert (parts["weights"], parts["batch"], parts["padding of inputs"]) == (50, 0, 0)
    memory = dataclasses.replace(memory, arguments=100, peak=100)
    assert memory_parts(dataclasses.replace(plan, memory=memory))["padding of inputs"] == 20


@pytest.mark.parametrize(("peak", "text"), [(0.5, "50 % of"), (1.5, "fits by the compiler: ")])
def test_plan_that_fits_names_no_share_above_the_limit(plan_of, peak, text):
    device = device_kind("v6e")
    memory = dataclasses.replace(plan_of("spmd").plan.memory, peak=int(peak * device.usable_bytes))
    plan = dataclasses.replace(plan_of("spmd").plan, device=device, memory=memory, fits=True)
    (line,) = verdict(plan)
    assert text in line and ("%" in line) == (peak < 1)


def test_bar_of_the_bound_has_another_color(plan_of):
    plan = plan_of("spmd").plan
    seconds = {"compute_seconds": 1.0, "memory_seconds": 2.0, "step_seconds": 2.0}
    bounds = dataclasses.replace(plan.bounds, limited_by="memory", **seconds)
    rows = _view("a", dataclasses.replace(plan, bounds=bounds))["bounds"]
    colors = {row["label"]: row["parts"][0]["color"] for row in rows}
    assert colors == {"compute": 0, "memory": 1}


def test_flops_of_layers_are_divided_by_pass(plan_of):
    layers = plan_of("spmd").plan.layers
    # 64 tokens, 3 layers, 16 × 32 weights, 2 FLOPs for each multiply-add, on 8 devices.
    forward = 2 * 64 * 3 * 16 * 32 / 8
    up = {"forward": forward, "backward": 2 * forward, "recomputed": forward}
    assert layers["lm/stack/sub/feed_forward/up"] == up
    # Nothing reads the output of the last product again.
    assert layers["lm/stack/sub/feed_forward/down"] == {**up, "recomputed": 0}
    assert layers["lm/softmax"]["forward"] == 2 * 64 * 16 * 32 / 8


def test_numbered_layers_and_those_of_nested_scans_are_one():
    scopes = {
        "/jvp(LM)/LM.fprop/lm/lm.fprop/layers_0/up/up.fprop/...d,de->...e": 8.0,
        "/jvp(LM)/lm/layers_1/up": 8.0,
        "/transpose(jvp(LM))/lm/layers_1/vmap(x)/up/jvp(LM)/lm/layers_1/up": 4.0,
        "/transpose(jvp(LM))/lm/sub.run/sub/rematted_computation/sub.run/sub/up": 2.0,
        "/transpose(jvp(LM))/lm/pipe/vmap(vmap())/StackOfLayers/StackOfLayers.fprop/up": 4.0,
        "/add": 6.0,
    }
    products = {(scope, "bfloat16"): flops for scope, flops in scopes.items()}
    assert layer_flops(products, device_kind("h100"), num_devices=2) == {
        "lm/layers_#/up": {"forward": 8.0, "backward": 2.0, "recomputed": 0.0},
        "lm/sub/up": {"forward": 0.0, "backward": 0.0, "recomputed": 1.0},
        "lm/pipe/up": {"forward": 0.0, "backward": 2.0, "recomputed": 0.0},
        "add": {"forward": 3.0, "backward": 0.0, "recomputed": 0.0},
    }


@pytest.mark.parametrize(("width", "dark"), [(1400, False), (400, False), (1400, True)])
def test_pages_of_one_and_of_two_plans_are_shown_in_browser(
    plan_of, open_page, tmp_path, width, dark
):
    spmd, pmap = plan_of("spmd").plan, plan_of("pmap").plan
    for plans in ({"a": spmd}, {"a": spmd, "b": pmap}):
        file = tmp_path / f"{len(plans)}.html"
        file.write_text(plan_html(plans))
        page = open_page(file, width=width, dark=dark)
        assert page.locator("svg[aria-label^=peak]").count() == len(plans)
        bar = page.locator("svg[aria-label^=peak]").first
        # The parts of the bar lie side by side, and fill it as the peak is the largest value.
        boxes = bar.evaluate(
            "s => [...s.querySelectorAll('rect')].map(r => r.getBoundingClientRect().width)"
        )
        share = spmd.memory.peak / max(plan.memory.peak for plan in plans.values())
        assert sum(boxes) == pytest.approx(share * bar.bounding_box()["width"], rel=0.02)
        assert page.locator("table.heat td").count() > 0
