"""Advice and searches as text."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Iterator

import jax.numpy as jnp

from layerkit_runner.files.byte_sizes import size_text
from layerkit_runner.tools.plan.compiler_notes import QUICK_NOTE
from layerkit_runner.tools.plan.page import seconds_text
from layerkit_runner.tools.plan.plan import Plan
from layerkit_runner.tools.plan.search.advice import Advice
from layerkit_runner.tools.plan.search.search import Candidate, Search

_REASON_LENGTH = 60


def advice_lines(advice: Iterable[Advice], plan: Plan) -> Iterator[str]:
    """What was tried to make a step fit, each as soon as it has been compiled.

    Args:
      advice: What was planned.
      plan: What does not fit.
    """
    yield "what would make it fit; each is compiled"
    has_fitted = False
    for each in advice:
        has_fitted = has_fitted or each.fits
        yield f"  {'fits' if each.fits else 'no  '}  {' '.join(each.flags)}"
        yield f"        {each.says}: {_outcome(each)}"
    if not has_fitted:
        yield "nothing that was tried makes it fit"
        yield from _devices_needed(plan)


def _outcome(advice: Advice) -> str:
    if advice.reason is not None:
        return advice.reason[:_REASON_LENGTH]
    seconds = "" if advice.step_seconds is None else f", {seconds_text(advice.step_seconds)} a step"
    return f"{size_text(advice.peak or 0)} on each device{seconds}"


def _devices_needed(plan: Plan) -> Iterator[str]:
    """How many devices have room for the state alone, which `fsdp` can split over all of them."""
    usable = None if plan.device is None else plan.device.usable_bytes
    if usable is not None:
        state = sum(
            math.prod(each.shape) * jnp.dtype(each.dtype).itemsize
            for each in plan.tensors
            if each.kind != "batch"
        )
        yield (
            f"weights and optimizer take {size_text(state)} in all, as much as"
            f" {-(-state // usable):,} such device(s) have; gradients and activations come on top"
        )


def search_json(search: Search) -> str:
    """A search as one JSON object on one line; the keys are the attributes of `Search`."""
    return json.dumps(dataclasses.asdict(search))


def search_page(search: Search) -> str:
    """A search for people."""
    return "\n".join(_search_lines(search))


def _search_lines(search: Search) -> Iterator[str]:
    yield f"search for {search.experiment}"
    memory = "" if search.usable_bytes is None else f", {size_text(search.usable_bytes)} on each"
    yield f"on {search.target}, {search.num_devices} devices{memory}; {search.rows} rows in a batch"
    policies = f" × {len(search.policies)} policies" if search.policies else ""
    yield (
        f"{search.num_meshes} meshes{policies}: {search.compilations} compiled in"
        f" {search.seconds:.0f} s"
    )
    if search.is_quick:
        yield QUICK_NOTE
    for why, count in search.left_out.items():
        yield f"  {count} left out: {why}"
    if search.limit is not None:
        yield f"ended by the limit of {search.limit}"
    yield ""
    knows_time = any(each.step_seconds is not None for each in search.ranked)
    crosses = any(each.bytes_slow for each in search.ranked)
    meshes = [_mesh_text(each) for each in search.ranked]
    axes = " × ".join(search.ranked[0].mesh)
    width = max(map(len, [axes, *meshes]))
    last = "step     none hidden  MFU" if knows_time else "sent by each device  nominal time"
    if crosses:
        last = f"{'slow':>9}  {last}"
    yield f"      {axes:<{width}}  {'remat':<14}{'peak':>9}  fits   {last}"
    for number, (candidate, mesh) in enumerate(zip(search.ranked, meshes, strict=True), start=1):
        now = "*" if not candidate.flags else " "
        row = f"{number:>3} {now} {mesh:<{width}}  {candidate.remat or '':<14}"
        figures = _figures(candidate, search.ranked[0], knows_time=knows_time, crosses=crosses)
        yield f"{row}{figures}".rstrip()
    yield "* as it is"
    if search.assumed:
        yield "not known of these devices, in no time above, and taken in the order alone for:"
        yield "  " + ", ".join(_speed_text(name, each) for name, each in search.assumed.items())
    yield ""
    if search.command is None:
        yield "nothing that was compiled fits"
    else:
        yield "the best"
        yield f"  --exp={search.experiment} {' '.join(search.command)}".rstrip()


def _mesh_text(candidate: Candidate) -> str:
    """`2 × 64 × 1, data 2 across`."""
    across = [f", {axis} {slices} across" for axis, slices in candidate.across.items()]
    return "".join([" × ".join(map(str, candidate.mesh.values())), *across])


def _speed_text(name: str, figure: float) -> str:
    """`memory bandwidth 819 GB/s`, `peak 197 TFLOP/s`, `latency 1 µs`."""
    if name == "latency":
        return f"{name} of a collective {seconds_text(figure)}"
    if name == "peak FLOP/s":
        return f"peak {figure / 1e12:.4g} TFLOP/s"
    return f"{name} {size_text(figure)}/s"


def _figures(candidate: Candidate, best: Candidate, *, knows_time: bool, crosses: bool) -> str:
    if candidate.reason is not None:
        return candidate.reason[:_REASON_LENGTH]
    fits = {None: "?", True: "yes", False: "no"}[candidate.fits]
    start = f"{size_text(candidate.peak or 0):>9}  {fits:<5}"
    if crosses:
        start += f"  {size_text(candidate.bytes_slow or 0):>9}"
    if not knows_time:
        # Of a typical device; how candidates compare is all that it tells.
        time = ""
        if candidate.order_seconds is not None and best.order_seconds:
            time = f"{candidate.order_seconds / best.order_seconds:.2f} × the best"
        return f"{start}  {size_text(candidate.bytes_sent or 0):<19}  {time}"
    if candidate.step_seconds is None or candidate.step_seconds_no_overlap is None:
        return start
    mfu = "" if candidate.mfu is None else f"{100 * candidate.mfu:.0f} %"
    return (
        f"{start}  {seconds_text(candidate.step_seconds):<8}"
        f" {seconds_text(candidate.step_seconds_no_overlap):<12} {mfu:<5} {candidate.limited_by}"
    )
