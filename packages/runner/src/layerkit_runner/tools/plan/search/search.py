"""`--mode=plan --search`: tries meshes and policies of rematerialisation, and ranks what fits.

The global batch, the model and the devices stay as they are. All meshes over data, fsdp and tensor
are estimated (`forecast`); what the mesh does not divide and what cannot fit is left out, and of
the rest the best are compiled, in the order of their estimated time, until a limit is reached. What
is ranked has been compiled. Same flags, same order, unless the time runs out.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Sequence

import jax

from layerkit_runner.config.resolve import ResolvedExperiment
from layerkit_runner.errors import UsageError
from layerkit_runner.tools.plan.plan import Plan
from layerkit_runner.tools.plan.search import changes
from layerkit_runner.tools.plan.search.assumed_speeds import AssumedSpeeds
from layerkit_runner.tools.plan.search.forecast import RECOMPUTED, Forecast
from layerkit_runner.tools.plan.search.meshes import MeshShape
from layerkit_runner.tools.plan.search.trials import Trials

# What is estimated to be larger than this part of the memory is not compiled to see.
_HOPELESS = 1.3


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A mesh and a policy, and what is known of them; None where it is not.

    Attributes:
      flags: To add to the command; none for the experiment as it is.
      mesh: Size of each axis.
      across: How many slices lie along an axis, where there are several.
      remat: The policy; None where the experiment has none to choose.
      estimated_peak: Bytes per device, before it was compiled.
      peak: Bytes per device, as compiled.
      fits: Whether a device has them.
      step_seconds: At best, where all communication hides behind arithmetic.
      step_seconds_no_overlap: At best, where none does.
      mfu: Utilisation in `step_seconds`.
      mfu_no_overlap: Likewise.
      limited_by: What takes longest.
      bytes_sent: By each device.
      bytes_slow: Those of them that go to another slice or node.
      unknown: Speeds of the device that these times would need, and that are not known.
      order_seconds: What the order goes by: `step_seconds` and `step_seconds_no_overlap` together,
        with assumed speeds in the place of the unknown ones; None where there is no program.
      reason: Why it could not be compiled.
    """

    flags: list[str]
    mesh: dict[str, int]
    remat: str | None
    across: dict[str, int] = dataclasses.field(default_factory=dict)
    estimated_peak: int | None = None
    peak: int | None = None
    fits: bool | None = None
    step_seconds: float | None = None
    step_seconds_no_overlap: float | None = None
    mfu: float | None = None
    mfu_no_overlap: float | None = None
    limited_by: str | None = None
    bytes_sent: int | None = None
    bytes_slow: int | None = None
    unknown: list[str] = dataclasses.field(default_factory=list)
    order_seconds: float | None = None
    reason: str | None = None


@dataclasses.dataclass(frozen=True)
class Search:
    """What a search found.

    Attributes:
      experiment: Its full name.
      target: The devices, as `--target` says them.
      num_devices: How many.
      usable_bytes: Of one device; None where that is not known.
      rows: Of the global batch, the same for all.
      ranked: What was compiled, the best first; what does not fit, and what failed, last.
      command: The flags of the best one, those that the experiment had already included; None where
        nothing fits.
      num_meshes: How many there are.
      policies: Those that were considered.
      left_out: How many were not compiled, by reason.
      limit: Which limit ended the search, if one did.
      compilations: How many there were.
      seconds: How long it took.
      is_quick: Whether the compiler was asked for less effort than a run asks for, at least first.
      assumed: Speeds that the order takes the unknown ones for, by name.
    """

    experiment: str
    target: str
    num_devices: int
    usable_bytes: int | None
    rows: int
    ranked: list[Candidate]
    command: list[str] | None
    num_meshes: int
    policies: list[str]
    left_out: dict[str, int]
    limit: str | None
    compilations: int
    seconds: float
    is_quick: bool = False
    assumed: dict[str, float] = dataclasses.field(default_factory=dict)


def search(resolved: ResolvedExperiment, trials: Trials, devices: Sequence[jax.Device]) -> Search:
    """Tries meshes and policies for an experiment.

    Args:
      resolved: The experiment; its own mesh fits the devices, and is tried first.
      trials: Plans for these devices, within limits.
      devices: What to plan for.

    Raises:
      UsageError: an experiment without a mesh to choose, or which cannot be planned as it is.
    """
    first = trials.run(resolved)
    if first.plan is None:
        raise UsageError(f"{resolved.name} cannot be planned as it is: {first.reason}")
    forecast = Forecast(resolved, first.plan, devices)
    if not forecast.meshes:
        raise UsageError(
            f"--search tries meshes over data, fsdp and tensor, and {resolved.name} has none: it"
            f" runs under {first.plan.partitioner} on {_mesh_text(first.plan.mesh)}"
        )
    left_out: collections.Counter[str] = collections.Counter()
    own = _candidate(forecast, [], forecast.own_mesh, forecast.remat, forecast.peak({}))
    compiled = [_measured(own, first.plan, forecast.speeds)]
    variants = _variants(forecast, left_out)
    for variant in variants:
        if trials.reached is not None:
            left_out["not reached"] = len(variants) + 1 - len(compiled)
            break
        trial = trials.run(variant.resolved)
        compiled.append(
            dataclasses.replace(variant.candidate, reason=trial.reason)
            if trial.plan is None
            else _measured(variant.candidate, trial.plan, forecast.speeds)
        )
    ranked = sorted(compiled, key=order)
    return Search(
        experiment=resolved.name,
        target=first.plan.target,
        num_devices=first.plan.num_devices,
        usable_bytes=forecast.kind.usable_bytes,
        rows=first.plan.batch.rows,
        ranked=ranked,
        command=_command(resolved, ranked[0]),
        num_meshes=len(forecast.meshes),
        policies=forecast.policies,
        left_out=dict(left_out),
        limit=trials.reached if left_out["not reached"] else None,
        compilations=trials.compiled,
        seconds=trials.seconds,
        is_quick=first.plan.is_quick,
        assumed=forecast.speeds.figures(name for each in ranked for name in each.unknown),
    )


@dataclasses.dataclass(frozen=True)
class _Variant:
    """A candidate that is worth compiling, and when its turn is."""

    candidate: Candidate
    resolved: ResolvedExperiment
    turn: tuple[bool, float]


def _variants(forecast: Forecast, left_out: collections.Counter[str]) -> list[_Variant]:
    """What is worth compiling, the most promising first; the others are counted."""
    found: list[_Variant] = []
    policies: list[str | None] = [*forecast.policies] or [None]
    for mesh in forecast.meshes:
        for policy in policies:
            if mesh == forecast.own_mesh and policy == forecast.remat:
                continue
            made = _variant(forecast, mesh, policy)
            if isinstance(made, str):
                left_out[made] += 1
            else:
                found.append(made)
    return sorted(found, key=lambda variant: variant.turn)


def _variant(forecast: Forecast, mesh: MeshShape, policy: str | None) -> _Variant | str:
    """A variant, or why it is left out."""
    wanted = forecast.mesh_changes(mesh)
    if policy != forecast.remat:
        wanted[changes.REMAT] = policy
    usable = forecast.kind.usable_bytes
    try:
        estimate = forecast.estimate(wanted)
    except ValueError:
        return "the mesh does not divide the model or the batch"
    if usable is not None and estimate.state_bytes > usable:
        return "weights and optimizer alone are too large"
    if usable is not None and estimate.peak_bytes > _HOPELESS * usable:
        return "far too large by estimate"
    try:
        varied = changes.changed(forecast.resolved, wanted)
    except UsageError:
        return "the experiment refuses it"
    flags = changes.new_flags(forecast.resolved, varied)
    candidate = _candidate(forecast, flags, mesh, policy, estimate.peak_bytes)
    # What hardly fits comes after what does.
    is_large = not forecast.has(estimate.peak_bytes)
    return _Variant(candidate, varied, (is_large, forecast.seconds(wanted)))


def _candidate(
    forecast: Forecast,
    flags: list[str],
    mesh: MeshShape,
    policy: str | None,
    estimated_peak: int | None,
) -> Candidate:
    sizes, across = forecast.mesh_sizes(mesh), forecast.axes_across(mesh)
    return Candidate(flags, sizes, policy, across, estimated_peak)


def _measured(candidate: Candidate, plan: Plan, speeds: AssumedSpeeds) -> Candidate:
    """A candidate with what its plan says."""
    found = dataclasses.replace(candidate, peak=plan.memory.peak, fits=plan.fits)
    bounds = plan.bounds
    if bounds is None:  # the compiler refused it
        return found
    return dataclasses.replace(
        found,
        step_seconds=bounds.step_seconds,
        step_seconds_no_overlap=bounds.step_seconds_no_overlap,
        mfu=bounds.mfu,
        mfu_no_overlap=bounds.mfu_no_overlap,
        limited_by=bounds.limited_by,
        bytes_sent=sum(traffic.bytes_sent for traffic in plan.collectives),
        bytes_slow=sum(traffic.bytes_slow for traffic in plan.collectives),
        unknown=bounds.unknown,
        order_seconds=speeds.order_seconds(bounds.work, plan.collectives),
    )


def order(candidate: Candidate) -> tuple[float, ...]:
    """Least first: those that fit by the time of a step, midway between both overlaps, and those
    of like time by memory."""
    if candidate.reason is not None:
        return (2.0,)
    does_not_fit = float(candidate.fits is False)
    if candidate.order_seconds is None:
        # There is no program to tell its time by: first what computes least again.
        return (does_not_fit, math.inf, RECOMPUTED.get(candidate.remat or "none", 1.0))
    return (does_not_fit, candidate.order_seconds, candidate.peak or 0)


def _command(resolved: ResolvedExperiment, best: Candidate) -> list[str] | None:
    """The flags that make the experiment so, those that it had already included."""
    if best.reason is not None or best.fits is False:
        return None
    names = {flag.strip("'").partition("=")[0] for flag in best.flags}
    had = changes.overriding_flags(resolved)
    return [*(f for f in had if f.strip("'").partition("=")[0] not in names), *best.flags]


def _mesh_text(mesh: dict[str, int]) -> str:
    return " × ".join(f"{axis} {size}" for axis, size in mesh.items())
