"""Plans as a page of pictures, one or two side by side.

A plan is one that was just made, or one that `--mode=plan --json` printed.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Callable, Mapping
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

_MOST_DEVICES = 512


def read_plan(file: str) -> Plan:
    """Return the plan of a file with the output of `--mode=plan --json`.

    Raises:
      UsageError: The file cannot be read, or no page can be made of it.
    """
    try:
        plan: Plan = _from_json(Plan, json.loads(read_regular(file)))
        plan_html({file: plan})
    except Exception as error:  # the file may hold anything
        expected = f"a file that --mode=plan --json of this version printed ({error!r})"
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
        most_devices=_MOST_DEVICES,
    )


def _facts(plan: Plan) -> dict[str, str]:
    """Return texts about a plan by their names."""
    facts = {"devices": devices_text(plan), "memory": " ".join(verdict(plan)) or "limit unknown"}
    name = ""
    for title, text in summary_rows(plan):
        name = title or name
        facts[name] = f"{facts[name]}, {text}" if name in facts else text
    for name, time, remark in bound_rows(plan):
        if "overlap" in name:
            facts[f"step time, {name}"] = f"{time}: {remark}"
    return facts


def _view(name: str, plan: Plan) -> dict[str, Any]:
    """Return what the template shows of a plan."""
    memory, usable = plan.memory, plan.device and plan.device.usable_bytes
    top = memory.peak - memory.temporaries + max(plan.live.bytes if plan.live else [0])
    seconds, limit = (plan.bounds.seconds, plan.bounds.limited_by) if plan.bounds else ({}, "")
    sums = {layer: sum(by_pass.values()) for layer, by_pass in plan.layers.items()}
    flops = sum(sums.values()) or 1
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
            "seconds": max((time or 0 for time in seconds.values()), default=0),
            "sent": max((traffic.bytes_sent for traffic in plan.collectives), default=0),
            "flops": max(sums.values(), default=0),
        },
        "memory": _bar("peak", size_text(memory.peak), memory_parts(plan), size_text),
        "memory_rows": [*memory_rows(plan)],
        "bounds": [
            _bar(row, f"{text}, {remark}", {row: time}, seconds_text, first_color=row == limit)
            for row, text, remark in bound_rows(plan)
            if (time := seconds.get(row))
        ],
        "flops": [
            _bar(
                layer,
                f"{_flops_text(sums[layer])}, {100 * sums[layer] / flops:.1f} %",
                plan.layers[layer],
                _flops_text,
            )
            for layer in sorted(sums, key=lambda layer: -sums[layer])
        ],
        "flops_in_all": _flops_text(flops),
        "hosts": _devices_by_host(plan),
        "hosts_along": _hosts_along_axes(plan),
        "weights": weight_table(groups, plan.mesh, plan.placement.devices),
    }


def _bar(
    label: str,
    note: str,
    parts: Mapping[str, float],
    text: Callable[[float], str],
    *,
    first_color: int = 0,
) -> dict[str, Any]:
    """Return a row of the macro `stacked_bars`."""
    colored = [
        {"name": name, "color": color, "value": value, "text": f"{name} {text(value)}"}
        for color, (name, value) in enumerate(parts.items(), first_color)
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


def _flops_text(flops: float) -> str:
    return scaled_text(flops, ["FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP"])


def _devices_by_host(plan: Plan) -> dict[str, list[tuple[int, tuple[int, ...]]]]:
    """Return devices and their positions in the mesh, by host."""
    place = plan.placement
    grid = np.ndenumerate(np.reshape(place.devices, [*plan.mesh.values()]))
    rows = sorted(
        (device.item(), position, host, part)
        for (position, device), host, part in zip(grid, place.hosts, place.slices, strict=True)
    )
    hosts: dict[str, list[tuple[int, tuple[int, ...]]]] = {}
    for device, position, host, part in rows[:_MOST_DEVICES]:
        within = f"slice {part}, " if plan.num_slices > 1 and place.slices != place.hosts else ""
        hosts.setdefault(f"{within}host {host}", []).append((device, position))
    return hosts


def _hosts_along_axes(plan: Plan) -> list[int]:
    """Return the number of hosts among the devices along each mesh axis."""
    grid = np.reshape(plan.placement.hosts, [*plan.mesh.values()])
    lines = [np.moveaxis(grid, axis, -1).reshape(-1, size) for axis, size in enumerate(grid.shape)]
    return [max(len({*line}) for line in of_axis.tolist()) for of_axis in lines]
