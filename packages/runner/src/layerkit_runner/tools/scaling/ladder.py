"""Rungs: runs of one experiment at growing FLOPs, written as the trials of a study file."""

from __future__ import annotations

import bisect
import functools
import json
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from layerkit.config.checks import require
from layerkit_runner.config.requests import Override, ResolvedExperiment, field_overrides
from layerkit_runner.data.train_inputs import training_configs
from layerkit_runner.errors import UsageError
from layerkit_runner.files.bounded_documents import parse_toml
from layerkit_runner.partitioning.mesh import num_mesh_devices
from layerkit_runner.run.job import build_parts
from layerkit_runner.run.job_folder import last_step_path
from layerkit_runner.run.start_report import num_params
from layerkit_runner.step.step_cost import model_flops_per_step
from layerkit_runner.tools.plan.plan import abstract_batch
from layerkit_runner.tools.plan.targets import planned_target, target_devices

_SIZES = range(1, 513)
_MAX_MISFIT = math.log(2.0)


class Size(NamedTuple):
    """Number of weights N, those of embeddings included, tokens D and model FLOPs C of steps."""

    N: int
    D: float
    C: float

    def times(self, steps: float) -> Size:
        """Return the size of a run of so many of these steps."""
        return Size(self.N, self.D * steps, self.C * steps)


Rung = tuple[Size, dict[str, Any]]
"""The size of a run, and the values of its fields by path."""


def step_size(resolved: ResolvedExperiment, *, num_devices: int | None = None) -> Size:
    """Return the size of one step of an experiment, counted as `--mode=plan` counts.

    Args:
      resolved: The experiment, whose training data sets have batches of one shape.
      num_devices: Number of devices if the experiment sets no mesh; None for those of this machine.
    """
    partitioner, task = build_parts(resolved)
    is_here = num_devices is None and num_mesh_devices(partitioner) is None
    target = planned_target(
        partitioner, target="here" if is_here else None, default=num_devices or 1
    )
    partitioner.start(target_devices(target))
    partitioner.bind(task)
    configs = training_configs(resolved)
    batches = {name: abstract_batch(one, partitioner) for name, one in configs.items()}
    shapes = {name: batch.ids.shape if "ids" in batch else () for name, batch in batches.items()}
    is_text = len({*shapes.values()}) == 1 and all(len(shape) > 1 for shape in shapes.values())
    expected = "tokens, ids [batch, length], of one shape for all data sets"
    require(is_text, resolved.name, "batch", shapes, expected, UsageError)
    batch = next(iter(batches.values()))
    state = partitioner.abstract_stored_state(task)
    flops = model_flops_per_step(resolved.task, state, batch, batch.ids.shape[0])
    return Size(num_params(state.params), math.prod(batch.ids.shape), flops)


def plan_rungs(
    budgets: Iterable[float],
    overrides: Sequence[Override],
    resolve: Callable[[Sequence[Override]], ResolvedExperiment],
    *,
    ratio: float,
) -> list[Rung]:
    """Return a rung for each number of FLOPs, of the size whose D/N is next to a ratio.

    `resolve` applies overrides to the experiment, and `overrides` are those of all rungs.

    Raises:
      UsageError: The experiment defines no sizes, or none whose D/N is within a factor of 2 of the
        ratio, or a rung has fewer FLOPs than a step.
    """
    base = resolve(overrides)
    if not base.experiment.size_fields(1):
        hint = "Define size_fields(size), which returns the fields of a model of a size."
        raise UsageError("the experiment defines no sizes", owner=base.name, hint=hint)

    def fields_of(size: int) -> dict[str, Any]:
        return {o.path: o.text for o in overrides} | base.experiment.size_fields(size)

    @functools.cache
    def step_of(size: int) -> Size:
        return step_size(resolve(field_overrides(fields_of(size))))

    def misfit(size: int, flops: float) -> float:
        step = step_of(size)
        return math.log(ratio * step.N * step.C / (step.D * flops))

    if (path := last_step_path(base)) is None:
        expected = "no stages, since a rung sets the number of steps"
        raise UsageError(owner=base.name, field="number of steps", expected=expected)
    rungs = []
    for flops in budgets:
        error_of = functools.partial(misfit, flops=flops)
        first = bisect.bisect(_SIZES, 0.0, key=error_of)
        size = min(_SIZES[max(first - 1, 0) : first + 1], key=lambda s: abs(error_of(s)))
        if abs(error := error_of(size)) > _MAX_MISFIT:
            nearest = ratio / math.exp(error)
            expected = f"FLOPs for D/N = {ratio:g}; the nearest size, {size}, has {nearest:.3g}"
            raise UsageError(field="--flops", value=flops, expected=expected)
        if (steps := round(flops / step_of(size).C)) < 1:
            expected = f"at least the {step_of(size).C:.3g} FLOPs of a step"
            raise UsageError(field="--flops", value=flops, expected=expected)
        fields = fields_of(size) | {path: steps}
        rungs.append((step_of(size).times(steps), fields))
    return rungs


def repeat_with_seeds(rung: Rung, base: ResolvedExperiment, *, num_seeds: int) -> list[Rung]:
    """Return runs of a rung that differ in their initial weights and the order of their data."""
    first = {"task.train.random_seed": base.task.train.random_seed}
    for index, config in enumerate(base.datasets):
        if config.is_training:
            first[f"datasets.{index}.input_random_seed"] = config.input_random_seed or 0
    size, fields = rung
    seeds = [{path: seed + i for path, seed in first.items()} for i in range(1, num_seeds)]
    return [rung, *((size, fields | more) for more in seeds)]


def ladder_text(metric: str, rungs: Sequence[Rung], larger: Sequence[Rung]) -> str:
    """Return rungs as a study file in TOML, with the larger run to predict, if any.

    Raises:
      UsageError: TOML has no form of a value, such as None or infinity.
    """
    lines = [f"metric = {_toml(metric)}"]
    for index, (size, fields) in enumerate([*rungs, *larger]):
        about = f"{size.C:.4g} FLOPs: {size.N:,} weights, {size.D:,.0f} tokens"
        lines += ["", f"# {about}, {size.D / size.N:.3g} per weight"]
        lines += ["[[trials]]" if index < len(rungs) else "[larger]"]
        for path, value in fields.items():
            key = path if path.isascii() and path.isidentifier() else _toml(path)
            try:
                parse_toml(line := f"{key} = {_toml(value)}")
            except (TypeError, ValueError) as error:
                expected = 'a value that TOML can hold, or its text, such as "None"'
                raise UsageError(field=path, value=value, expected=expected) from error
            lines.append(line)
    return "\n".join([*lines, ""])


def _toml(value: Any) -> str:
    """Return a value in JSON, which is valid TOML but for DEL, None, NaN and infinity."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
