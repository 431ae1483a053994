"""What `--mode=plan` does besides one plan: advice where it does not fit, and `--search`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import jax

from layerkit_runner.config.resolve import ResolvedExperiment
from layerkit_runner.errors import UsageError
from layerkit_runner.tools.plan.page import plan_json, plan_page
from layerkit_runner.tools.plan.plan import Plan
from layerkit_runner.tools.plan.search.advice import Advice, advise
from layerkit_runner.tools.plan.search.forecast import Forecast
from layerkit_runner.tools.plan.search.pages import advice_lines, search_json, search_page
from layerkit_runner.tools.plan.search.search import search
from layerkit_runner.tools.plan.search.trials import Limits, Trials

Make = Callable[[ResolvedExperiment], Plan]


def print_search(
    resolved: ResolvedExperiment,
    make: Make,
    devices: Sequence[jax.Device],
    *,
    limits: Limits,
    as_json: bool,
) -> None:
    """Searches meshes and policies for an experiment and prints what was found.

    Args:
      resolved: The experiment.
      make: Plans one on the devices.
      devices: What to plan for.
      limits: Of the compilations.
      as_json: Whether to print one JSON object.

    Raises:
      UsageError: no compilation is allowed, or there is nothing to search.
    """
    if limits.compilations < 1:
        raise UsageError("--max_compilations=0: a search compiles at least the experiment as it is")
    found = search(resolved, Trials(make, limits), devices)
    print(search_json(found) if as_json else search_page(found), flush=True)


def print_plan(
    resolved: ResolvedExperiment,
    plan: Plan,
    make: Make,
    devices: Sequence[jax.Device],
    *,
    limits: Limits,
    as_json: bool,
) -> None:
    """Prints a plan, and what would make it fit if it does not.

    Args:
      resolved: The experiment.
      plan: Of it.
      make: Plans one on the devices.
      devices: What was planned for.
      limits: Of the compilations for advice; with none allowed there is none.
      as_json: Whether to print one JSON object, with the advice under `advice`.
    """
    trials = Trials(make, limits)
    advice: Iterator[Advice] = iter(())
    if plan.fits is False and limits.compilations > 0:
        advice = advise(Forecast(resolved, plan, devices), trials)
    if as_json:
        print(plan_json(plan, advice=[dataclasses.asdict(each) for each in advice]), flush=True)
        return
    # At once, since advice takes as long as several plans.
    print(plan_page(plan), flush=True)
    if plan.fits is False and limits.compilations > 0:
        print(flush=True)
        for line in advice_lines(advice, plan):
            print(line, flush=True)
        if trials.reached is not None:
            print(f"ended by the limit of {trials.reached}", flush=True)
