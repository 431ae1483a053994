"""`--mode=plan`: prints what a training step will need, before any hardware is asked for.

    runner --exp=… --mode=plan                      on as many devices as the mesh has
    runner --exp=… --mode=plan --num_devices=8      where the mesh takes what there is, as pmap does
    runner --exp=… --mode=plan --target=cpux8       the same
    runner --exp=… --mode=plan --json               one JSON object, with the keys of `Plan`
    runner --exp=… --mode=plan --search             other meshes and policies, the best first
    runner --exp=… --mode=plan --target=v5p --plan_effort=full    compiled as a run does it
    runner --exp=… --mode=plan --target=v4 --xla_flags_preset=tpu_fsdp    with compiler flags

A plan that does not fit is followed by what would make it fit.
Nothing is written to disk, and no accelerator of this machine is touched.
"""

from __future__ import annotations

import dataclasses

import jax

from layerkit_runner.config.flags import RunOptions
from layerkit_runner.config.resolve import ResolvedExperiment
from layerkit_runner.distributed.xla_flags import check_devices, flag_lines, set_compiler_flags
from layerkit_runner.partitioning import Partitioner
from layerkit_runner.tools.plan.devices import planned_target, target_devices
from layerkit_runner.tools.plan.plan import Plan, make_plan
from layerkit_runner.tools.plan.search.command import print_plan, print_search
from layerkit_runner.tools.plan.search.trials import Limits
from layerkit_runner.trainer.build_programs import check_train_programs
from layerkit_runner.trainer.job import build_parts
from layerkit_runner.training.task import SingleTask


def run_plan(resolved: ResolvedExperiment, options: RunOptions) -> int:
    """Prints the plan of an experiment; returns the exit code.

    Raises:
      UsageError: flags or fields that do not fit together, or sizes that do not fit the mesh.
    """
    check_train_programs(resolved)  # a plan is of training: what only evaluates has none
    parts = build_parts(resolved)
    target = planned_target(parts[0], target=options.target, num_devices=options.num_devices)
    set_compiler_flags(options)
    devices = target_devices(target)
    check_devices(options, devices[0].device_kind)
    # A program from the cache would cost no time to compile, and tell less about itself.
    jax.config.update("jax_enable_compilation_cache", False)  # noqa: FBT003

    flags = [f"compiled with {line}" for line in flag_lines(options)]

    # Whose step is planned, once that is known: what is compared is of one data set.
    dataset: str | None = None

    def make(
        varied: ResolvedExperiment, parts: tuple[Partitioner, SingleTask] | None = None
    ) -> Plan:
        nonlocal dataset
        plan = make_plan(
            varied,
            devices,
            parts=parts,
            target=target,
            effort=options.plan_effort,
            dataset=dataset,
        )
        dataset = plan.dataset
        return dataclasses.replace(plan, notes=[*flags, *plan.notes])

    limits = Limits(options.max_compilations, options.max_seconds)
    if options.search:
        print_search(resolved, make, devices, limits=limits, as_json=options.json)
        return 0
    plan = make(resolved, parts)
    print_plan(resolved, plan, make, devices, limits=limits, as_json=options.json)
    return 0
