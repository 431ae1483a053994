"""What would make a step fit that is too large: changes, each planned before it is told.

| change | what it costs |
|---|---|
| a policy of rematerialisation that keeps less | computing again |
| the loss over chunks of positions (`SOFTMAX_CHUNK_SIZE`) | computing logits again |
| bfloat16 for the optimizer's first moment | a little precision |
| gradient accumulation | smaller products; the batch stays the same |
| another mesh, with more of `fsdp` or `tensor` | network |
| fewer rows on each device | another batch, and so another training run |

Each is tried alone, in the strength that is estimated to do (`estimates`). If none is enough alone,
they are put together, in this order, until the step fits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

from layerkit_runner.config.resolve import ResolvedExperiment
from layerkit_runner.errors import UsageError
from layerkit_runner.tools.plan.search import changes
from layerkit_runner.tools.plan.search.changes import Changes
from layerkit_runner.tools.plan.search.forecast import Forecast
from layerkit_runner.tools.plan.search.trials import Trials

# What is estimated to be larger than this part of the memory is not compiled to see.
_HOPELESS = 1.3
_TRIES_PER_KNOB = 2
_CHUNKS = 8
_MOST_PARTS = 64
_MESHES = 3


@dataclasses.dataclass(frozen=True)
class Advice:
    """A change that was planned.

    Attributes:
      flags: To add to the command.
      says: What it does, for people.
      peak: Bytes per device; None where it could not be planned.
      fits: Whether a device has them.
      step_seconds: At best; None where nothing is known of the device's speed.
      reason: Why it could not be planned.
    """

    flags: list[str]
    says: str
    peak: int | None
    fits: bool
    step_seconds: float | None
    reason: str | None = None


@dataclasses.dataclass(frozen=True)
class Knob:
    """Something to change.

    Attributes:
      strengths: The changes, the weakest first, each with what it says to people.
    """

    strengths: list[tuple[Changes, str]]


def advise(forecast: Forecast, trials: Trials) -> Iterator[Advice]:
    """Plans what may make an experiment fit.

    Args:
      forecast: Of the experiment that does not fit.
      trials: Plans, within limits.

    Yields:
      What was planned, whether it fits or not.
    """
    knobs = [knob for knob in _knobs(forecast) if knob.strengths]
    has_fitted = False
    for knob in knobs:
        for wanted, says in _promising(knob, forecast):
            if trials.reached is not None:
                return
            advice = _tried(forecast.resolved, wanted, says, trials)
            yield advice
            if advice.fits:
                has_fitted = True
                break
    if not has_fitted:
        yield from _together(knobs, forecast, trials)


def _together(knobs: list[Knob], forecast: Forecast, trials: Trials) -> Iterator[Advice]:
    """All knobs at once, each as far as needed by estimate, and further where that errs."""
    together: dict[str, Any] = {}
    said: list[str] = []
    error = 1.0  # by which estimates were too low
    for knob in knobs:
        before, says_before = dict(together), list(said)
        for wanted, says in knob.strengths:
            peak = forecast.peak({**before, **wanted})
            if peak is None:  # does not go with what was chosen
                continue
            together, said = {**before, **wanted}, [*says_before, says]
            is_last = knob is knobs[-1] and wanted is knob.strengths[-1][0]
            limit = _HOPELESS * forecast.usable_bytes if is_last else forecast.usable_bytes
            if len(said) == 1 or peak * error > limit:
                continue  # each knob alone has been tried
            if trials.reached is not None:
                return
            advice = _tried(forecast.resolved, together, "; ".join(said), trials)
            yield advice
            if advice.fits:
                return
            error = max(error, (advice.peak or 0) / peak)


def _promising(knob: Knob, forecast: Forecast) -> Iterable[tuple[Changes, str]]:
    """From the weakest strength that is estimated to do, at most so many; else the strongest, where
    it is not hopeless."""
    peaks = [forecast.peak(wanted) for wanted, _ in knob.strengths]
    first = next((n for n, p in enumerate(peaks) if p is not None and forecast.has(p)), None)
    if first is not None:
        return knob.strengths[first : first + _TRIES_PER_KNOB]
    last = peaks[-1]
    is_hopeless = last is not None and last > _HOPELESS * forecast.usable_bytes
    return [] if is_hopeless else knob.strengths[-1:]


def _tried(resolved: ResolvedExperiment, wanted: Changes, says: str, trials: Trials) -> Advice:
    try:
        varied = changes.changed(resolved, wanted)
    except UsageError as error:
        return Advice([], says, None, fits=False, step_seconds=None, reason=str(error))
    flags = changes.new_flags(resolved, varied)
    trial = trials.run(varied)
    if trial.plan is None:
        return Advice(flags, says, None, fits=False, step_seconds=None, reason=trial.reason)
    plan = trial.plan
    return Advice(
        flags,
        says,
        plan.memory.peak,
        fits=plan.fits is True,
        step_seconds=None if plan.bounds is None else plan.bounds.step_seconds,
    )


def _knobs(forecast: Forecast) -> Iterator[Knob]:
    resolved, plan = forecast.resolved, forecast.plan
    yield Knob(
        [({changes.REMAT: name}, f"remat {name}") for name in forecast.policies_that_keep_less()]
    )
    yield _chunked_loss(forecast)
    if _is_unset(resolved, changes.FIRST_MOMENT):
        yield Knob([({changes.FIRST_MOMENT: "bfloat16"}, "first moment in bfloat16")])
    yield _accumulation(forecast)
    yield Knob(
        [
            (wanted, "mesh " + " × ".join(f"{axis} {size}" for axis, size in sizes.items()))
            for wanted, sizes in forecast.smaller_meshes(_MESHES)
        ]
    )
    if changes.can_change(resolved, changes.ROWS):
        yield Knob(
            [
                ({changes.ROWS: rows / plan.num_devices}, f"{rows} rows instead of {most}")
                for most in [plan.batch.rows]
                for rows in _halves(most)
                if rows % plan.batch.num_shards == 0 and forecast.divides_pipelines(rows)
            ]
        )


def _chunked_loss(forecast: Forecast) -> Knob:
    length = forecast.plan.batch.length
    if length is None or length < _CHUNKS:
        return Knob([])
    if not _is_unset(forecast.resolved, changes.SOFTMAX_CHUNK):
        return Knob([])
    size = length // _CHUNKS
    return Knob([({changes.SOFTMAX_CHUNK: size}, f"loss in chunks of {size} positions")])


def _accumulation(forecast: Forecast) -> Knob:
    resolved, batch = forecast.resolved, forecast.plan.batch
    if not changes.can_change(resolved, changes.ACCUMULATION):
        return Knob([])
    before = changes.current(resolved, changes.ACCUMULATION) or 1
    return Knob(
        [
            (
                {changes.ACCUMULATION: before * parts},
                f"gradients of {before * parts} parts of the batch, one after another",
            )
            for parts in (2**n for n in range(1, _MOST_PARTS.bit_length()))
            if batch.rows % (batch.num_shards * before * parts) == 0
            and forecast.divides_pipelines(batch.rows // (before * parts))
        ]
    )


def _is_unset(resolved: ResolvedExperiment, name: str) -> bool:
    return changes.can_change(resolved, name) and changes.current(resolved, name) is None


def _halves(rows: int) -> Iterator[int]:
    while rows % 2 == 0:
        rows //= 2
        yield rows
