"""`--mode=plan`: the command that prints the plan of a training step, or a search for a better one.

docs/planning.md describes the flags. Nothing is written to disk, and no accelerator of this machine
is used.
"""

from __future__ import annotations

import dataclasses

import jax

from layerkit_runner.config.flags import RunOptions
from layerkit_runner.config.resolve import ResolvedExperiment
from layerkit_runner.distributed.devices import check_devices, flag_lines, set_compiler_flags
from layerkit_runner.tools.plan.devices import planned_target, target_devices
from layerkit_runner.tools.plan.page import plan_json, plan_page
from layerkit_runner.tools.plan.plan import make_plan
from layerkit_runner.tools.plan.search import search, search_json, search_page
from layerkit_runner.trainer.build_programs import check_train_programs
from layerkit_runner.trainer.job import build_parts


def run_plan(resolved: ResolvedExperiment, options: RunOptions) -> int:
    """Print the plan of an experiment, or a search, and return the exit code.

    Raises:
      UsageError: Flags or fields do not fit together, or sizes do not fit the mesh.
    """
    check_train_programs(resolved)  # an experiment without training has no step to plan
    parts = build_parts(resolved)
    target = planned_target(parts[0], target=options.target, num_devices=options.num_devices)
    set_compiler_flags(options)
    devices = target_devices(target)
    check_devices(options, devices[0].device_kind)
    # A program from the compilation cache has no figures.
    jax.config.update("jax_enable_compilation_cache", False)  # noqa: FBT003

    if options.search:
        found = search(
            resolved,
            devices,
            target=target,
            max_compilations=options.max_compilations,
            max_seconds=options.max_seconds,
            effort=options.plan_effort,
        )
        print(search_json(found) if options.json else search_page(found), flush=True)
        return 0
    plan = make_plan(resolved, devices, parts=parts, target=target, effort=options.plan_effort)
    flags = [f"compiled with {line}" for line in flag_lines(options)]
    plan = dataclasses.replace(plan, notes=[*flags, *plan.notes])
    print(plan_json(plan) if options.json else plan_page(plan), flush=True)
    return 0
