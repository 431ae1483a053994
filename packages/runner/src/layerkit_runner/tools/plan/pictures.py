"""Plans as a page of pictures, one or two side by side.

A plan is one that was just made, or one that `--mode=plan --json` printed.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from layerkit_runner.errors import UsageError
from layerkit_runner.files.atomic_write import read_regular
from layerkit_runner.files.text import scaled_text, seconds_text, size_text
from layerkit_runner.tools.pages.page import render_page
from layerkit_runner.tools.pages.shards import weight_table
from layerkit_runner.tools.plan.bounds import PASSES
from layerkit_runner.tools.plan.memory import join_layers
from layerkit_runner.tools.plan.page import (
    array_text,
    bound_rows,
    devices_text,
    memory_rows,
    memory_sizes,
    summary_rows,
    verdict,
)
from layerkit_runner.tools.plan.plan import Plan

_MOST_LAYERS = 12
_MOST_DEVICES = 512


def read_plan(file: str) -> Plan:
    """Return the plan of a file with the output of `--mode=plan --json`.

    Raises:
      UsageError: The file cannot be read, or has no plan of this version.
    """
    try:
        plan: Plan = _from_json(Plan, json.loads(read_regular(file)))
    except (OSError, ValueError, TypeError, KeyError) as error:
        expected = f"a file that --mode=plan --json of this version printed ({error})"
        raise UsageError(field="--compare", value=file, expected=expected) from error
    return plan


def _from_json(kind: Any, value: Any) -> Any:
    """Return a value of JSON with dataclasses where the type `kind` has them."""
    arguments = typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        names = [field.name for field in dataclasses.fields(kind) if field.init]
        return typing.cast(Any, kind)(**{n: _from_json(hints[n], value[n]) for n in names})
    if isinstance(kind, types.UnionType) and value is not None:
        return _from_json(arguments[0], value)
    if typing.get_origin(kind) is list:
        return [_from_json(arguments[0], item) for item in value]
    return value


def plan_html(plans: Mapping[str, Plan]) -> str:
    """Return a page with plans side by side, by their names. A single plan needs no name."""
    views = [_view(name, plan) for name, plan in plans.items()]
    facts = [_facts(plan) for plan in plans.values()]
    return render_page(
        "plan/page.html.jinja",
        title=" and ".join(dict.fromkeys(f"plan of {p.experiment}" for p in plans.values())),
        plans=views,
        facts={row: [texts.get(row, "") for texts in facts] for row in facts[0] | facts[-1]},
        full={name: max(view["full"][name] for view in views) for name in views[0]["full"]},
        kinds={part["name"]: part["color"] for v in views for part in v["memory"]["parts"]},
        passes={name: color for color, name in enumerate(PASSES)},
    )


def _facts(plan: Plan) -> dict[str, str]:
    """Return texts about a plan by their names."""
    facts = {"devices": devices_text(plan), "memory": " ".join(verdict(plan))}
    for name, text in summary_rows(plan):
        facts[name or "batch"] = text if name else f"{facts['batch']}, {text}"
    overlaps = [row for row in bound_rows(plan) if "overlap" in row[0]]
    facts |= {f"step time, {name}": f"{time}: {remark}" for name, time, remark in overlaps}
    return {name: text for name, text in facts.items() if text}


def _view(name: str, plan: Plan) -> dict[str, Any]:
    """Return what the template shows of a plan."""
    memory, collectives = plan.memory, plan.collectives
    usable = plan.device and plan.device.usable_bytes
    top = memory.peak - memory.temporaries + max(plan.live.bytes if plan.live else [0])
    layers = _largest_layers(plan)
    sums = {layer: sum(by_pass.values()) for layer, by_pass in layers.items()}
    flops = sum(sums.values()) or 1
    seconds = plan.bounds.seconds if plan.bounds and plan.bounds.step_seconds else {}
    bounds = {row: time for row, time in seconds.items() if time}
    remarks = {row: (text, remark) for row, text, remark in bound_rows(plan)}
    weights = [tensor for tensor in plan.tensors if tensor.kind == "weights"]
    groups = join_layers(weights, lambda weight: (array_text(weight),))
    return {
        "name": name,
        "plan": plan,
        "limit": usable,
        "full": {
            "bytes": max(memory.peak, usable or 0),
            # A limit that is far above the curve would flatten it.
            "live": max(top, memory.peak, usable if usable and usable < 2 * top else 0),
            "seconds": max(bounds.values(), default=0),
            "sent": max((traffic.bytes_sent for traffic in collectives), default=0),
            "flops": max(sums.values(), default=0),
        },
        "memory": _bar(f"peak {size_text(memory.peak)}", "", memory_parts(plan), size_text),
        "memory_rows": [*memory_rows(plan)],
        "bounds": [
            _bar(
                row, ", ".join(remarks[row]), {row: time}, seconds_text, int("←" in remarks[row][1])
            )
            for row, time in bounds.items()
        ],
        "traffic": {
            (t.kind, t.axes): (
                t.bytes_sent,
                f"{size_text(t.bytes_sent)} in {t.executions:,}"
                + f", {size_text(t.bytes_slow)} slow" * (t.bytes_slow > 0),
            )
            for t in collectives
        },
        "axes": [*_mesh_views(plan)],
        "flops": [
            _bar(
                name,
                f"{_flops_text(sums[name])}, {100 * sums[name] / flops:.1f} %",
                layer,
                _flops_text,
            )
            for name, layer in layers.items()
        ],
        "flops_in_all": _flops_text(flops),
        "weights": weight_table(groups, plan.mesh, plan.placement.devices),
    }


def _bar(
    label: str, note: str, parts: Mapping[str, float], text: Callable[[float], str], color: int = 0
) -> dict[str, Any]:
    """Return a row of the macro `stacked_bars`, with colors from `color`."""
    colored = [
        {"name": name, "color": color + at, "value": value, "text": f"{name} {text(value)}"}
        for at, (name, value) in enumerate(parts.items())
    ]
    return {"label": label, "note": note, "parts": [part for part in colored if part["value"]]}


def memory_parts(plan: Plan) -> dict[str, int]:
    """Return bytes by kind that add up to the peak of a plan.

    Inputs that the step does not read are left out, first of the batch and then of the weights.
    """
    parts = memory_sizes(plan)
    rest = plan.memory.peak - sum(parts.values())
    for kind in ("batch", "weights"):
        parts[kind] += (change := max(min(rest, 0), -parts[kind]))
        rest -= change
    return {**parts, "padding of inputs": rest}


def _largest_layers(plan: Plan) -> dict[str, dict[str, float]]:
    """Return the FLOPs of the layers that have most, and of all others."""
    order = sorted(plan.layers, key=lambda layer: -sum(plan.layers[layer].values()))
    largest = {layer: plan.layers[layer] for layer in order[:_MOST_LAYERS]}
    if rest := order[_MOST_LAYERS:]:
        sums = {kind: sum(plan.layers[layer][kind] for layer in rest) for kind in PASSES}
        largest[f"{len(rest)} others"] = sums
    return largest


def _flops_text(flops: float) -> str:
    return scaled_text(flops, ["FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP"])


def _mesh_views(plan: Plan) -> Iterator[dict[str, Any]]:
    """Yield what the macro `machines` draws, for each mesh axis that has several devices."""
    sizes, place = [*plan.mesh.values()], plan.placement
    grid = np.indices(sizes).reshape(len(sizes), -1)
    where = [f"host {host}" for host in place.hosts]
    if place.hosts != place.slices and len({*place.slices}) > 1:
        where = [f"slice {at}, {host}" for at, host in zip(place.slices, where, strict=True)]
    order = np.argsort(place.devices, kind="stable")[:_MOST_DEVICES].tolist()
    for index, (axis, size) in enumerate(plan.mesh.items()):
        hosts: dict[str, list[tuple[float, int, str]]] = {}
        for at in order:
            position = ", ".join(f"{a} {i}" for a, i in zip(plan.mesh, grid[:, at], strict=True))
            cell = (
                grid[index, at] / max(size - 1, 1),
                grid[index, at],
                f"device {place.devices[at]}: {position}",
            )
            hosts.setdefault(where[at], []).append(cell)
        lines = np.moveaxis(np.reshape(place.hosts, sizes), index, -1).reshape(-1, size)
        spans = max(len({*line}) for line in lines.tolist())
        if size > 1:
            yield {
                "label": f"{axis} {size}, across {spans} host(s)",
                "hosts": hosts,
                "hidden": len(place.devices) - len(order),
            }
