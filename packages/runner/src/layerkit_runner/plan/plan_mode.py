"""`--mode=plan`: prints what a training step will need, before any hardware is asked for.

    runner --exp=… --mode=plan                      on as many devices as the mesh has
    runner --exp=… --mode=plan --num_devices=8      where the mesh takes what there is, as pmap does
    runner --exp=… --mode=plan --target=cpux8       the same
    runner --exp=… --mode=plan --json               one JSON object, with the keys of `Plan`

Nothing is written to disk, and no accelerator of this machine is touched.
"""

from __future__ import annotations

import jax

from layerkit_runner.command_line.flags import RunOptions
from layerkit_runner.configuration.resolve import ResolvedExperiment
from layerkit_runner.job import build_parts
from layerkit_runner.plan.devices import num_planned_devices, simulated_devices
from layerkit_runner.plan.page import plan_json, plan_page
from layerkit_runner.plan.plan import make_plan


def run_plan(resolved: ResolvedExperiment, options: RunOptions) -> int:
    """Prints the plan of an experiment; returns the exit code.

    Raises:
      UsageError: flags or fields that do not fit together, or sizes that do not fit the mesh.
    """
    parts = build_parts(resolved)
    count = num_planned_devices(parts[0], target=options.target, num_devices=options.num_devices)
    devices = simulated_devices(count)
    # A program from the cache would cost no time to compile, and tell less about itself.
    jax.config.update("jax_enable_compilation_cache", False)  # noqa: FBT003
    plan = make_plan(resolved, devices, parts=parts)
    print(plan_json(plan) if options.json else plan_page(plan), flush=True)
    return 0
