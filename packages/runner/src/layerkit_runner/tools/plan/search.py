"""`--mode=plan --search`: compile other meshes and rematerialization policies, and rank them.

The model, the global batch and the devices stay the same. While nothing fits, gradient accumulation
increases. The search compiles, one at a time, an untried neighbor of the best candidate so far.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import gc
import itertools
import math
import shlex
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax

from layerkit.config.checks import require
from layerkit_runner.config.config_tree import config_json
from layerkit_runner.config.requests import Override, ResolvedExperiment
from layerkit_runner.errors import UsageError
from layerkit_runner.files.text import draw_table, seconds_text, size_text
from layerkit_runner.partitioning.mesh import along_default_axis
from layerkit_runner.run.resolve import add_overrides
from layerkit_runner.tools.plan.bounds import RESOURCES, Bounds, DeviceWork
from layerkit_runner.tools.plan.hardware import DeviceKind, Target, device_kind
from layerkit_runner.tools.plan.plan import Plan, StateTooLargeError, make_plan

_ICI = "partitioner.ici_mesh_shape"
_DCN = "partitioner.dcn_mesh_shape"
_ACCUMULATION = "task.train.gradient_accumulation_steps"
# In a pipeline the policy of a stage takes precedence over that of the layers within it.
_STAGE_REMAT, _REMAT = ".stage_remat", ".remat"
# Each policy keeps less for the backward pass, and recomputes more, than the one before it.
_POLICIES = ("none", "dots", "dots_no_batch", "projections", "attention_out", "full")
_FREE_AXES = ("data", "fsdp", "tensor")
# The network between slices is too slow for activations.
_FREE_AXES_ACROSS = ("data", "fsdp")
_REASON_LENGTH = 200

_RANKED_BY = "step time: the mean of the bounds with full overlap and with no overlap"
# Its rates stand in for those of other devices that are unknown, so that candidates have an order.
_REFERENCE = device_kind("h100")


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A compiled variant of the experiment, with the flags to add to the command.

    `across` maps each mesh axis that spans several slices to its number of slices. `seconds` is the
    estimate of the step time by which candidates are ranked. `notes` are of its plan. `reason`
    is the error that prevented compilation.
    """

    flags: list[str]
    mesh: dict[str, int]
    remat: str | None
    across: dict[str, int] = dataclasses.field(default_factory=dict)
    accumulation: int = 1
    peak: int | None = None
    fits: bool | None = None
    bounds: Bounds | None = None
    seconds: float | None = None
    notes: list[str] = dataclasses.field(default_factory=list)
    reason: str | None = None


@dataclasses.dataclass(frozen=True)
class Search:
    """The result of a search; `command` has the flags of the best candidate that may fit.

    `compilations` counts the candidates that compiled, and `left_out` those that were not compiled,
    by reason. `limit` names the limit that ended the search; None if nothing was left to try.
    `h100_rates` names the unknown rates of the devices, for which those of an H100 were used.
    `num_stages` is the number of STAGES, 0 for none. A candidate then fits if all do, and its time
    is that of the one with the largest memory.
    """

    experiment: str
    target: str
    num_devices: int
    usable_bytes: int | None
    rows: int
    ranked: list[Candidate]
    command: list[str] | None
    compilations: int
    left_out: dict[str, int]
    limit: str | None
    h100_rates: list[str]
    seconds: float
    num_stages: int = 0


class Point(NamedTuple):
    """One combination of the choices that a search varies; `dcn` is None for one slice."""

    ici: tuple[int, ...]
    dcn: tuple[int, ...] | None = None
    remat: str | None = None
    accumulation: int = 1


def neighbors(point: Point, axes: Sequence[str], *, fits: bool | None) -> Iterator[Point]:
    """Yield the points that differ from `point` in one choice.

    Points with more gradient accumulation are yielded only if `point` does not fit in memory.
    """
    if point.remat is not None:
        at = _POLICIES.index(point.remat) if point.remat in _POLICIES else len(_POLICIES)
        # A step that does not fit must keep less.
        for index in (at + 1, at - 1) if fits is False else (at - 1, at + 1):
            if 0 <= index < len(_POLICIES):
                yield point._replace(remat=_POLICIES[index])
    if fits is False:
        yield point._replace(accumulation=2 * point.accumulation)
    for sizes in _moved(point.ici, axes, _FREE_AXES):
        yield point._replace(ici=sizes)
    for sizes in _moved(point.dcn or (1,) * len(axes), axes, _FREE_AXES_ACROSS):
        yield point._replace(dcn=sizes)


def _moved(
    sizes: tuple[int, ...], axes: Sequence[str], free: Sequence[str]
) -> Iterator[tuple[int, ...]]:
    """Yield `sizes` with the smallest prime factor of one free axis moved to another."""
    indices = [axes.index(name) for name in free if name in axes]
    for source, target in itertools.permutations(indices, 2):
        factor = next((n for n in range(2, sizes[source] + 1) if sizes[source] % n == 0), None)
        if factor is not None:
            moved = list(sizes)
            moved[source] //= factor
            moved[target] *= factor
            yield tuple(moved)


def order(candidate: Candidate) -> tuple[float, ...]:
    """Return the sort key of a candidate; those that do not fit, or do not compile, come last."""
    peak = float(candidate.peak or 0)
    if candidate.reason is not None:
        return (3.0,)
    if candidate.fits is False:
        return (2.0, peak)
    if candidate.seconds is None:  # the compiled program could not be read
        return (1.0, peak)
    return (0.0, candidate.seconds, peak)


def estimate_seconds(work: DeviceWork, device: DeviceKind) -> float:
    """Return the mean of the bounds of a step's time; `_REFERENCE` has the rates of no figure."""
    compute, memory, fast, slow = (
        getattr(work, amount) / (getattr(device, rate) or getattr(_REFERENCE, rate))
        for amount, rate in RESOURCES.values()
    )
    return (max(compute, memory, fast, slow) + max(compute, memory) + fast + slow) / 2


class _Searcher:
    """The state of one search, with the compiled `candidates` by their points."""

    def __init__(
        self, resolved: ResolvedExperiment, devices: Sequence[jax.Device], *, target: Target
    ):
        self._resolved = resolved
        self._platform = devices[0].platform
        self._plan = functools.partial(make_plan, devices=devices, target=target)
        self._values: dict[str, Any] = config_json(resolved)["config"]
        paths = [path for path in self._values if path.startswith("task.")]
        stages = {path.removesuffix(_STAGE_REMAT) for path in paths if path.endswith(_STAGE_REMAT)}
        self._remat_paths = [
            path
            for path in paths
            if path.endswith(_STAGE_REMAT)
            or (path.endswith(_REMAT) and path.removesuffix(_REMAT) not in stages)
        ]
        self.first = self._plan(resolved)
        self._axes = tuple(self.first.mesh)
        self._start = self._start_point()
        self.candidates = {self._start: self._candidate(self._start, [], **_measured(self.first))}
        self.left_out: collections.Counter[str] = collections.Counter()
        self._rejection = ""
        self._tried = {self._start}

    def _start_point(self) -> Point:
        name, value = self._resolved.name, self.first.partitioner
        expected = "a partitioner with ici_mesh_shape, which --search varies"
        require(_ICI in self._values, name, "partitioner", value, expected, UsageError)
        dcn = tuple(self._values[_DCN] or ())
        if not dcn and self._values[_ICI] is None and self._platform == "tpu":
            # As the partitioner lays slices without sizes.
            dcn = tuple(along_default_axis(self.first.num_slices, self._axes))
        is_sliced = math.prod(dcn) > 1
        across = dcn if is_sliced else (1,) * len(self._axes)
        sizes = zip(self.first.mesh.values(), across, strict=True)
        return Point(
            ici=tuple(size // outer for size, outer in sizes),
            dcn=dcn if is_sliced else None,
            # Parts of a model may differ; the neighbors have one policy.
            remat=", ".join(dict.fromkeys(self._values[p] for p in self._remat_paths)) or None,
            accumulation=self._values.get(_ACCUMULATION, 1),
        )

    def next_point(self) -> Point | None:
        """Return an untried neighbor of the best candidate that has one."""
        for point, candidate in sorted(self.candidates.items(), key=lambda item: order(item[1])):
            if candidate.reason is None:
                for near in neighbors(point, self._axes, fits=candidate.fits):
                    if near not in self._tried:
                        return near
        return None

    def try_point(self, point: Point) -> None:
        """Compile a point, or count the reason for which it is skipped."""
        self._tried.add(point)
        flags = self._flags(point)
        try:
            plan = self._plan(self.varied(flags), check_state=True)
            self.candidates[point] = self._candidate(point, flags, **_measured(plan))
        except StateTooLargeError as error:
            self.left_out[str(error)] += 1
        except UsageError as error:
            self._rejection = self._rejection or f"the experiment rejects it, such as: {error}"
            self.left_out[" ".join(self._rejection.split())[:_REASON_LENGTH]] += 1
        except (ValueError, TypeError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
            source = "the compiler: " if isinstance(error, jax.errors.JaxRuntimeError) else ""
            reason = (source + " ".join(str(error).split()))[:_REASON_LENGTH]
            self.candidates[point] = self._candidate(point, flags, reason=reason)
        finally:
            # JAX caches programs that will never run again; they add up to gigabytes.
            jax.clear_caches()
            gc.collect()

    def _flags(self, point: Point) -> list[str]:
        """Return the flags of the configuration paths in which a point differs from the start."""
        start, edits = self._start, dict[str, Any]()
        if point.ici != start.ici:
            edits[_ICI] = point.ici
        if point.dcn is not None and list(point.dcn) != list(self._values[_DCN] or ()):
            edits[_DCN] = point.dcn
        if point.remat != start.remat:
            edits |= dict.fromkeys(self._remat_paths, point.remat)
        if point.accumulation != start.accumulation:
            edits[_ACCUMULATION] = point.accumulation
        return [
            f"--fdl.{path}="
            + (f"[{','.join(map(str, value))}]" if isinstance(value, tuple) else str(value))
            for path, value in edits.items()
        ]

    def varied(self, flags: Sequence[str]) -> ResolvedExperiment:
        """Return the experiment with the fields that some flags `--fdl.PATH=TEXT` set."""
        edits = [flag.removeprefix("--fdl.").split("=", 1) for flag in flags]
        return add_overrides(self._resolved, [Override(path, text) for path, text in edits])

    def _candidate(self, point: Point, flags: list[str], **measured: Any) -> Candidate:
        dcn = point.dcn or (1,) * len(point.ici)
        sizes = zip(self._axes, point.ici, dcn, strict=True)
        return Candidate(
            flags,
            {axis: inner * outer for axis, inner, outer in sizes},
            point.remat,
            across={axis: n for axis, n in zip(self._axes, dcn, strict=True) if n > 1},
            accumulation=point.accumulation,
            **measured,
        )


def _measured(plan: Plan) -> dict[str, Any]:
    seconds = None
    if plan.bounds is not None and plan.device is not None:
        seconds = estimate_seconds(plan.bounds.work, plan.device)
    return {
        "peak": plan.memory.peak,
        "fits": plan.fits,
        "bounds": plan.bounds,
        "seconds": seconds,
        "notes": plan.notes,
    }


def search(
    resolved: ResolvedExperiment,
    devices: Sequence[jax.Device],
    *,
    target: Target,
    max_compilations: int,
    max_seconds: float,
) -> Search:
    """Compile variants of an experiment, first the experiment itself, and rank them."""
    begun = time.monotonic()
    searcher = _Searcher(resolved, devices, target=target)
    limit = None
    while (point := searcher.next_point()) is not None:
        if len(searcher.candidates) >= max_compilations:
            limit = f"{max_compilations} compilations (--max_compilations)"
            break
        if time.monotonic() - begun >= max_seconds:
            limit = f"{max_seconds:g} s (--max_seconds)"
            break
        searcher.try_point(point)
    first, ranked = searcher.first, sorted(searcher.candidates.values(), key=order)
    command = None
    if ranked[0].fits is not False:
        overrides = config_json(searcher.varied(ranked[0].flags))["overrides"]
        command = [f"--fdl.{path}={text}" for path, text in overrides.items()]
    return Search(
        experiment=resolved.name,
        target=first.target,
        num_devices=first.num_devices,
        usable_bytes=None if first.device is None else first.device.usable_bytes,
        rows=first.batch.rows,
        ranked=ranked,
        command=command,
        compilations=sum(candidate.reason is None for candidate in ranked),
        left_out=dict(searcher.left_out),
        limit=limit,
        h100_rates=[
            rate for _, rate in RESOURCES.values() if getattr(first.device, rate, None) is None
        ],
        seconds=time.monotonic() - begun,
        num_stages=len(first.stages),
    )


def search_page(search: Search) -> str:
    """Return a search as a table."""
    memory = "" if search.usable_bytes is None else f", {size_text(search.usable_bytes)} on each"
    lines = [
        f"search for {search.experiment}",
        f"on {search.target}, {search.num_devices} devices{memory}; {search.rows} rows in a batch",
        f"{search.compilations} candidates compiled in {search.seconds:.0f} s",
        *(f"  {count} left out: {why}" for why, count in search.left_out.items()),
    ]
    if search.limit is not None:
        lines.append(f"stopped at the limit of {search.limit}; other candidates were not compiled")
    axes = " × ".join(search.ranked[0].mesh)
    head = (
        "",
        "",
        axes,
        "remat",
        "peak",
        "fits",
        "sent",
        "between slices",
        "full overlap",
        "no overlap",
        "MFU",
    )
    rows: list[tuple[str, ...]] = []
    for number, candidate in enumerate(search.ranked, start=1):
        mesh = " × ".join(map(str, candidate.mesh.values()))
        mesh += "".join(f", {n} slices along {axis}" for axis, n in candidate.across.items())
        if candidate.accumulation > 1:
            mesh += f", {candidate.accumulation} microbatches"
        mark = "" if candidate.flags else "*"
        rows.append((str(number), mark, mesh, candidate.remat or "", *_figures(candidate)))
    ranked_by = _RANKED_BY
    if search.h100_rates:
        ranked_by += f", with an H100's {', '.join(search.h100_rates)}, unknown for the target"
    if search.num_stages:
        ranked_by += f"; of {search.num_stages} STAGES, that of the one with the largest memory"
    lines += [f"ranked by: {ranked_by}", "", *draw_table(rows, head=head, right=(0, 4, 6, 7))]
    lines += ["* the experiment as it is", ""]
    if search.command is None:
        return "\n".join([*lines, "no compiled candidate fits"])
    command = shlex.join([f"--exp={search.experiment}", *search.command])
    notes = [f"  {note}" for note in search.ranked[0].notes]
    return "\n".join([*lines, "the best", f"  {command}", *notes])


def _figures(candidate: Candidate) -> tuple[str, ...]:
    """Return the cells of the peak and of the columns right of it."""
    if candidate.reason is not None:
        return ("", *[""] * 5, candidate.reason[:60])
    fits = {None: "?", True: "yes", False: "no"}[candidate.fits]
    bounds = candidate.bounds
    cells: tuple[str, ...] = (size_text(candidate.peak or 0), fits)
    if bounds is None:
        return (*cells, *[""] * 5)
    work = bounds.work
    cells += (size_text(work.fast_bytes + work.slow_bytes), size_text(work.slow_bytes))
    if bounds.step_seconds is None or bounds.step_seconds_no_overlap is None:
        return (*cells, *[""] * 3)
    mfu = "" if bounds.mfu is None else f"{100 * bounds.mfu:.0f} %"
    times = map(seconds_text, (bounds.step_seconds, bounds.step_seconds_no_overlap))
    return (*cells, *times, f"{mfu} {bounds.limited_by}")
