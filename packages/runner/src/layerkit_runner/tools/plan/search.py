"""`--mode=plan --search`: compile other meshes and rematerialisation policies, and rank them.

The model, the global batch and the devices stay as they are. Candidates differ in the mesh sizes of
`data`, `fsdp` and `tensor`, in the rematerialisation policy of the layers, and, while nothing fits,
in gradient accumulation. The search starts at the experiment as it is and compiles, one at a time,
an untried neighbour of the best candidate so far. A candidate is left out without being compiled
if the experiment rejects it or if its weights and optimizer state alone exceed the memory.
"""

from __future__ import annotations

import collections
import dataclasses
import gc
import itertools
import json
import math
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from layerkit_runner.config.config_text import config_json
from layerkit_runner.config.overrides import Override
from layerkit_runner.config.resolve import ResolvedExperiment, resolve
from layerkit_runner.errors import UsageError
from layerkit_runner.files.byte_sizes import size_text
from layerkit_runner.tools.plan.compiling import QUICK_NOTE
from layerkit_runner.tools.plan.page import seconds_text
from layerkit_runner.tools.plan.plan import Plan, compile_plan, prepare_step
from layerkit_runner.tools.plan.targets import Target

_ICI = "partitioner.ici_mesh_shape"
_DCN = "partitioner.dcn_mesh_shape"
_ACCUMULATION = "task.train.gradient_accumulation_steps"
# In a pipeline the policy of a stage takes precedence over that of the layers within it.
_STAGE_REMAT, _REMAT = ".stage_remat", ".remat"
# Each policy keeps less for the backward pass, and computes more again, than the one before it.
_POLICIES = ("none", "dots", "dots_no_batch", "projections", "attention_out", "full")
_FREE_AXES = ("data", "fsdp", "tensor")
# The network between slices is too slow for activations.
_FREE_AXES_ACROSS = ("data", "fsdp")
_REASON_LENGTH = 200
_REASON_LENGTH_ON_PAGE = 60

BY_TIME = "time of a step, midway between all communication hidden and none"
BY_BYTES = (
    "bytes sent between slices, then all bytes read, written and sent, since speeds are unknown"
)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A compiled variant of the experiment. Fields of its plan are None if there is no program.

    Attributes:
      flags: Flags to add to the command; empty for the experiment as it is.
      mesh: Size of each mesh axis.
      across: Number of slices along each mesh axis that spans several.
      remat: Rematerialisation policy; None if the experiment has none to choose.
      accumulation: Number of parts of the batch whose gradients are added up one after another.
      peak: Peak bytes per device.
      fits: Whether the peak is within the device's memory; None if that is unknown.
      step_seconds: Lower bound of the step time with all communication hidden.
      step_seconds_no_overlap: Lower bound of the step time with no communication hidden.
      mfu: Model FLOPs utilisation at `step_seconds`.
      mfu_no_overlap: Model FLOPs utilisation at `step_seconds_no_overlap`.
      limited_by: The resource that takes longest.
      bytes_moved: Bytes that each device reads from and writes to its memory.
      bytes_sent: Bytes that each device sends.
      bytes_slow: Part of `bytes_sent` that goes to other slices or nodes.
      unknown: Device speeds that the times would need and that are unknown.
      reason: Why the candidate could not be compiled; None if it was.
    """

    flags: list[str]
    mesh: dict[str, int]
    remat: str | None
    across: dict[str, int] = dataclasses.field(default_factory=dict)
    accumulation: int = 1
    peak: int | None = None
    fits: bool | None = None
    step_seconds: float | None = None
    step_seconds_no_overlap: float | None = None
    mfu: float | None = None
    mfu_no_overlap: float | None = None
    limited_by: str | None = None
    bytes_moved: float | None = None
    bytes_sent: int | None = None
    bytes_slow: int | None = None
    unknown: list[str] = dataclasses.field(default_factory=list)
    reason: str | None = None


@dataclasses.dataclass(frozen=True)
class Search:
    """The result of a search.

    Attributes:
      experiment: Full name of the experiment.
      target: The devices in the syntax of `--target`.
      num_devices: Number of devices.
      usable_bytes: Usable memory of one device; None if unknown.
      rows: Rows of the global batch, the same for all candidates.
      ranked: The compiled candidates, best first.
      ranked_by: What candidates that fit are ranked by.
      command: All `--fdl` flags of the best candidate; None if no candidate fits.
      compilations: Number of compiled candidates.
      left_out: Number of candidates that were not compiled, by reason.
      limit: The limit that ended the search; None if no candidate was left to compile.
      seconds: Duration of the search.
      is_quick: Whether the compiler was asked for less effort than a run asks for.
    """

    experiment: str
    target: str
    num_devices: int
    usable_bytes: int | None
    rows: int
    ranked: list[Candidate]
    ranked_by: str
    command: list[str] | None
    compilations: int
    left_out: dict[str, int]
    limit: str | None
    seconds: float
    is_quick: bool = False


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of a search.

    Attributes:
      compilations: Maximum number of compiled candidates.
      seconds: Time after which no further compilation starts.
    """

    compilations: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class Point:
    """The choices that a search varies.

    Attributes:
      ici: Size of each mesh axis within a slice.
      dcn: Number of slices along each mesh axis; None for one slice.
      remat: Rematerialisation policy; None if there is none to choose.
      accumulation: Number of parts of the batch.
    """

    ici: tuple[int, ...]
    dcn: tuple[int, ...] | None = None
    remat: str | None = None
    accumulation: int = 1


def neighbours(
    point: Point, axes: Sequence[str], *, fits: bool | None
) -> Iterator[tuple[str, Point]]:
    """Yield the points that differ from `point` in one choice, each with the name of the move.

    Args:
      point: Where to start.
      axes: Names of the mesh axes.
      fits: Whether the point fits in memory. Only if False, gradient accumulation is increased.

    Yields:
      (move, neighbour). Applying the same move again goes further in the same direction.
    """
    if point.remat is not None:
        at = _POLICIES.index(point.remat) if point.remat in _POLICIES else len(_POLICIES)
        for move, index in (("keep more", at - 1), ("keep less", at + 1)):
            if 0 <= index < len(_POLICIES):
                yield move, dataclasses.replace(point, remat=_POLICIES[index])
    if fits is False:
        more = dataclasses.replace(point, accumulation=2 * point.accumulation)
        yield "accumulate", more
    for move, sizes in _moved(point.ici, axes, _FREE_AXES):
        yield f"ici {move}", dataclasses.replace(point, ici=sizes)
    if point.dcn is not None:
        for move, sizes in _moved(point.dcn, axes, _FREE_AXES_ACROSS):
            yield f"dcn {move}", dataclasses.replace(point, dcn=sizes)


def _moved(
    sizes: tuple[int, ...], axes: Sequence[str], free: Sequence[str]
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield `sizes` with the smallest prime factor of one free axis moved to another."""
    indices = [axes.index(name) for name in free if name in axes]
    for source, target in itertools.permutations(indices, 2):
        factor = next((n for n in range(2, sizes[source] + 1) if sizes[source] % n == 0), None)
        if factor is not None:
            moved = list(sizes)
            moved[source] //= factor
            moved[target] *= factor
            yield f"{axes[source]} to {axes[target]}", tuple(moved)


def order(candidate: Candidate, ranked_by: str) -> tuple[float, ...]:
    """Return the sort key of a candidate, least first.

    Candidates that fit come first, in the order of `ranked_by`. Those that do not fit follow by
    their peak, and those that could not be compiled come last.
    """
    if candidate.reason is not None:
        return (3.0,)
    peak = float(candidate.peak or 0)
    if candidate.fits is False:
        return (2.0, peak)
    if candidate.bytes_moved is None:  # the compiled program could not be read
        return (1.0, peak)
    if ranked_by == BY_TIME:
        seconds = (candidate.step_seconds or 0) + (candidate.step_seconds_no_overlap or 0)
        return (0.0, seconds, peak)
    sent, slow = candidate.bytes_sent or 0, candidate.bytes_slow or 0
    return (0.0, float(slow), candidate.bytes_moved + sent, peak)


class _Searcher:
    """The state of one search."""

    def __init__(
        self,
        resolved: ResolvedExperiment,
        devices: Sequence[jax.Device],
        *,
        target: Target,
        effort: str,
    ):
        self._resolved = resolved
        self._devices = devices
        self._target = target
        self._effort = effort
        self._values: dict[str, Any] = config_json(resolved)["config"]
        paths = [path for path in self._values if path.startswith("task.")]
        stages = [path.removesuffix(_STAGE_REMAT) for path in paths if path.endswith(_STAGE_REMAT)]
        self._remat_paths = [f"{stage}{_STAGE_REMAT}" for stage in stages] + [
            path
            for path in paths
            if path.endswith(_REMAT) and path.removesuffix(_REMAT) not in stages
        ]
        self.candidates: dict[Point, Candidate] = {}
        self.moves: dict[Point, str] = {}
        self.times_tried: collections.Counter[str] = collections.Counter()
        self.left_out: collections.Counter[str] = collections.Counter()
        self.tried: set[Point] = set()
        self.first = self._plan({})
        self.axes = tuple(self.first.mesh)
        self.start = self._own_point()
        self.tried.add(self.start)
        self.candidates[self.start] = self._candidate(self.start, [], self.first)

    def _own_point(self) -> Point:
        if _ICI not in self._values:
            mesh = " × ".join(f"{axis} {size}" for axis, size in self.first.mesh.items())
            raise UsageError(
                f"--search varies the mesh axes data, fsdp and tensor, and {self._resolved.name}"
                f" has none: it runs under {self.first.partitioner} on {mesh}"
            )
        dcn = tuple(self._values[_DCN] or ())
        if not dcn and self._values[_ICI] is None:
            # Without sizes the partitioner lays the slices along the first axis.
            slices = self.first.num_slices if self._devices[0].platform == "tpu" else 1
            dcn = (slices, *[1] * (len(self.axes) - 1))
        across = dcn if math.prod(dcn) > 1 else (1,) * len(self.axes)
        sizes = zip(self.first.mesh.values(), across, strict=True)
        return Point(
            ici=tuple(size // outer for size, outer in sizes),
            dcn=dcn if math.prod(dcn) > 1 else None,
            remat=self._values[self._remat_paths[0]] if self._remat_paths else None,
            accumulation=self._values.get(_ACCUMULATION, 1),
        )

    def next_point(self) -> tuple[str, Point] | None:
        """Return an untried neighbour of the best candidate that has one, and the move to it."""
        ranked_by = self.ranked_by()
        best_first = sorted(
            self.candidates, key=lambda point: order(self.candidates[point], ranked_by)
        )
        for point in best_first:
            candidate = self.candidates[point]
            if candidate.reason is not None:
                break
            found = [
                (move, each)
                for move, each in neighbours(point, self.axes, fits=candidate.fits)
                if each not in self.tried
            ]
            if found:
                # The move that led here comes first, then those that were tried least.
                last = self.moves.get(point)
                return min(found, key=lambda each: (each[0] != last, self.times_tried[each[0]]))
        return None

    def try_point(self, move: str, point: Point) -> None:
        """Compile a point, or count why it is left out."""
        self.tried.add(point)
        self.moves[point] = move
        self.times_tried[move] += 1
        edits = self._edits(point)
        flags = [f"--fdl.{path}={text}" for path, text in edits.items()]
        try:
            plan = self._plan(edits)
        except _LeftOutError as error:
            self.left_out[str(error)] += 1
        except (ValueError, TypeError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
            self.candidates[point] = self._candidate(point, flags, None, reason=_reason(error))
        else:
            self.candidates[point] = self._candidate(point, flags, plan)
        finally:
            # JAX caches programs that will never run again; they add up to gigabytes.
            jax.clear_caches()
            gc.collect()

    def _edits(self, point: Point) -> dict[str, str]:
        """Return the configuration paths in which a point differs from the experiment."""
        edits: dict[str, str] = {}
        if point.ici != self.start.ici:
            edits[_ICI] = _literal(point.ici)
        if point.dcn is not None and (point.dcn != self.start.dcn or point.ici != self.start.ici):
            edits[_DCN] = _literal(point.dcn)
        if point.remat != self.start.remat:
            edits |= dict.fromkeys(self._remat_paths, str(point.remat))
        if point.accumulation != self.start.accumulation:
            edits[_ACCUMULATION] = str(point.accumulation)
        return {
            path: text for path, text in edits.items() if text != _literal(self._values.get(path))
        }

    def varied(self, edits: Mapping[str, str]) -> ResolvedExperiment:
        """Return the experiment with values set at some configuration paths."""
        kept = [each for each in self._resolved.deep_overrides if each.path not in edits]
        more = [Override(path, text) for path, text in edits.items()]
        return resolve(self._resolved.experiment, [*kept, *more])

    def _plan(self, edits: Mapping[str, str]) -> Plan:
        is_first = not edits
        try:
            varied = self._resolved if is_first else self.varied(edits)
            step = prepare_step(
                varied,
                self._devices,
                target=self._target,
                dataset=None if is_first else self.first.dataset,
            )
        except UsageError as error:
            if is_first:
                raise UsageError(
                    f"{self._resolved.name} cannot be planned as it is: {error}"
                ) from error
            raise _LeftOutError("the mesh or the experiment does not allow it") from error
        usable = step.device.usable_bytes
        if usable is not None and step.state_bytes > usable and not is_first:
            raise _LeftOutError("weights and optimizer state alone exceed the memory")
        return compile_plan(step, effort=self._effort)

    def ranked_by(self) -> str:
        """Return what candidates are ranked by: times only if all speeds they need are known."""
        read = [each for each in self.candidates.values() if each.bytes_moved is not None]
        knows_times = all(each.step_seconds is not None and not each.unknown for each in read)
        return BY_TIME if knows_times else BY_BYTES

    def _candidate(
        self, point: Point, flags: list[str], plan: Plan | None, *, reason: str | None = None
    ) -> Candidate:
        dcn = point.dcn or (1,) * len(point.ici)
        sizes = zip(self.axes, point.ici, dcn, strict=True)
        candidate = Candidate(
            flags,
            {axis: inner * outer for axis, inner, outer in sizes},
            point.remat,
            across={axis: n for axis, n in zip(self.axes, dcn, strict=True) if n > 1},
            accumulation=point.accumulation,
            reason=reason,
        )
        return candidate if plan is None else measured(candidate, plan)


def measured(candidate: Candidate, plan: Plan) -> Candidate:
    """Return the candidate with the figures of its plan."""
    found = dataclasses.replace(candidate, peak=plan.memory.peak, fits=plan.fits)
    if plan.bounds is None:  # the compiler rejected the step, or its program cannot be read
        return found
    return dataclasses.replace(
        found,
        step_seconds=plan.bounds.step_seconds,
        step_seconds_no_overlap=plan.bounds.step_seconds_no_overlap,
        mfu=plan.bounds.mfu,
        mfu_no_overlap=plan.bounds.mfu_no_overlap,
        limited_by=plan.bounds.limited_by,
        bytes_moved=plan.bounds.work.memory_bytes,
        bytes_sent=sum(traffic.bytes_sent for traffic in plan.collectives),
        bytes_slow=sum(traffic.bytes_slow for traffic in plan.collectives),
        unknown=plan.bounds.unknown,
    )


class _LeftOutError(Exception):
    """A candidate that is not compiled, with the reason."""


def search(
    resolved: ResolvedExperiment,
    devices: Sequence[jax.Device],
    *,
    target: Target,
    limits: Limits,
    effort: str = "full",
    clock: Callable[[], float] = time.monotonic,
) -> Search:
    """Compile variants of an experiment and rank them.

    Args:
      resolved: The experiment. It is compiled first, as it is.
      devices: Devices to compile for.
      target: What the devices stand for.
      limits: Limits of the search.
      effort: Effort of the compiler; see `compile_step`.
      clock: Clock in seconds.

    Raises:
      UsageError: `limits` allows no compilation, or the experiment has no mesh to choose or cannot
        be planned as it is.
    """
    if limits.compilations < 1:
        raise UsageError("--max_compilations=0: a search compiles at least the experiment as it is")
    begun = clock()
    searcher = _Searcher(resolved, devices, target=target, effort=effort)
    limit = None
    while (found := searcher.next_point()) is not None:
        if len(searcher.candidates) >= limits.compilations:
            limit = f"{limits.compilations} compilations (--max_compilations)"
            break
        if clock() - begun >= limits.seconds:
            limit = f"{limits.seconds:g} s (--max_seconds)"
            break
        searcher.try_point(*found)
    ranked_by, first = searcher.ranked_by(), searcher.first
    ranked = sorted(searcher.candidates.values(), key=lambda each: order(each, ranked_by))
    assert first.device is not None
    return Search(
        experiment=resolved.name,
        target=first.target,
        num_devices=first.num_devices,
        usable_bytes=first.device.usable_bytes,
        rows=first.batch.rows,
        ranked=ranked,
        ranked_by=ranked_by,
        command=_command(searcher, ranked[0]),
        compilations=len(ranked),
        left_out=dict(searcher.left_out),
        limit=limit,
        seconds=clock() - begun,
        is_quick=first.is_quick,
    )


def _command(searcher: _Searcher, best: Candidate) -> list[str] | None:
    if best.fits is False:
        return None
    edits = dict(flag.removeprefix("--fdl.").split("=", 1) for flag in best.flags)
    overrides = config_json(searcher.varied(edits))["overrides"]
    return [f"--fdl.{path}={text}" for path, text in overrides.items()]


def _literal(value: Any) -> str:
    """Return a value as the command line accepts it, without blanks."""
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(str, value))}]"
    return str(value)


def _reason(error: Exception) -> str:
    source = "the compiler: " if isinstance(error, jax.errors.JaxRuntimeError) else ""
    text = source + " ".join(str(error).split())
    return text if len(text) <= _REASON_LENGTH else text[: _REASON_LENGTH - 1] + "…"


def search_json(search: Search) -> str:
    """Return a search as one JSON object on one line; the keys are the attributes of `Search`."""
    return json.dumps(dataclasses.asdict(search))


def search_page(search: Search) -> str:
    """Return a search as a table."""
    return "\n".join(_lines(search))


def _lines(search: Search) -> Iterator[str]:
    yield f"search for {search.experiment}"
    memory = "" if search.usable_bytes is None else f", {size_text(search.usable_bytes)} on each"
    yield f"on {search.target}, {search.num_devices} devices{memory}; {search.rows} rows in a batch"
    yield f"{search.compilations} candidates compiled in {search.seconds:.0f} s"
    if search.is_quick:
        yield QUICK_NOTE
    for why, count in search.left_out.items():
        yield f"  {count} left out: {why}"
    if search.limit is not None:
        yield f"stopped at the limit of {search.limit}; other candidates were not compiled"
    yield f"ranked by: {search.ranked_by}"
    yield ""
    by_time = search.ranked_by == BY_TIME
    crosses = any(each.bytes_slow for each in search.ranked)
    meshes = [_mesh_text(each) for each in search.ranked]
    axes = " × ".join(search.ranked[0].mesh)
    width = max(map(len, [axes, *meshes]))
    last = "step     none hidden  MFU" if by_time else "sent by each device  read and written"
    last = f"{'slow':>9}  {last}" if crosses else last
    yield f"      {axes:<{width}}  {'remat':<14}{'peak':>9}  fits   {last}"
    for number, (candidate, mesh) in enumerate(zip(search.ranked, meshes, strict=True), start=1):
        now = "*" if not candidate.flags else " "
        figures = _figures(candidate, by_time=by_time, crosses=crosses)
        yield f"{number:>3} {now} {mesh:<{width}}  {candidate.remat or '':<14}{figures}".rstrip()
    yield "* the experiment as it is"
    yield ""
    if search.command is None:
        yield "no compiled candidate fits"
    else:
        yield "the best"
        yield f"  --exp={search.experiment} {shlex.join(search.command)}".rstrip()


def _mesh_text(candidate: Candidate) -> str:
    """Return text such as `2 × 64 × 1, data 2 across, 4 parts`."""
    more = [f", {axis} {slices} across" for axis, slices in candidate.across.items()]
    if candidate.accumulation > 1:
        more.append(f", {candidate.accumulation} parts")
    return "".join([" × ".join(map(str, candidate.mesh.values())), *more])


def _figures(candidate: Candidate, *, by_time: bool, crosses: bool) -> str:
    if candidate.reason is not None:
        return candidate.reason[:_REASON_LENGTH_ON_PAGE]
    fits = {None: "?", True: "yes", False: "no"}[candidate.fits]
    start = f"{size_text(candidate.peak or 0):>9}  {fits:<5}"
    if candidate.bytes_moved is None:
        return start
    if crosses:
        start += f"  {size_text(candidate.bytes_slow or 0):>9}"
    if not by_time or candidate.step_seconds is None or candidate.step_seconds_no_overlap is None:
        moved = size_text(candidate.bytes_moved)
        return f"{start}  {size_text(candidate.bytes_sent or 0):<19}  {moved}"
    mfu = "" if candidate.mfu is None else f"{100 * candidate.mfu:.0f} %"
    return (
        f"{start}  {seconds_text(candidate.step_seconds):<8}"
        f" {seconds_text(candidate.step_seconds_no_overlap):<12} {mfu:<5} {candidate.limited_by}"
    )
