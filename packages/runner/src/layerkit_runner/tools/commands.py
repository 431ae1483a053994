"""The commands and modes of the tools that come with the runner.

Each imports its tool when it runs, so that `--help` and errors of flags are fast.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from layerkit.config.checks import require
from layerkit.errors import pip_install
from layerkit_runner.config.flags import Command, FlagCommand, Mode
from layerkit_runner.errors import UsageError
from layerkit_runner.run_options import Flag, RunOptions, positive

if TYPE_CHECKING:
    from layerkit_runner.config.requests import ParsedFlags, ResolvedExperiment


def _plan(resolved: ResolvedExperiment, options: RunOptions) -> int:
    """Print the plan of an experiment, or a search; docs/planning.md."""
    import jax

    from layerkit_runner.config.requests import flag_word
    from layerkit_runner.distributed import devices
    from layerkit_runner.run.job import build_parts
    from layerkit_runner.run.job_errors import job_errors
    from layerkit_runner.run.programs.build_programs import train_dataset_configs
    from layerkit_runner.tools.pages.page import write_page
    from layerkit_runner.tools.plan import page, pictures, search, targets
    from layerkit_runner.tools.plan.plan import make_plan

    is_plan = options.html is None or not options.search
    require(is_plan, None, "--html", options.html, "a plan without --search", UsageError)
    others = (
        {} if options.compare is None else {options.compare: pictures.read_plan(options.compare)}
    )
    with job_errors("plan", resolved):
        train_dataset_configs(resolved)  # an experiment without training has no step to plan
        parts = build_parts(resolved)
        target = targets.planned_target(
            parts[0], target=options.target, num_devices=options.num_devices
        )
        devices.set_compiler_flags(options)
        planned = targets.target_devices(target)
        devices.check_devices(options, planned[0].device_kind)
        # A program from the compilation cache has no figures.
        jax.config.update("jax_enable_compilation_cache", False)  # noqa: FBT003
        if options.search:
            describe: Callable[[Any], str] = search.search_page
            result: Any = search.search(
                resolved,
                planned,
                target=target,
                max_compilations=options.max_compilations,
                max_seconds=options.max_seconds,
            )
            if result.command is not None and options.xla_flags_preset is not None:
                preset = flag_word("xla_flags_preset", options.xla_flags_preset)
                result = dataclasses.replace(result, command=[*result.command, preset])
        else:
            plan = make_plan(resolved, planned, parts=parts, target=target)
            flags = [f"compiled with {line}" for line in devices.flag_lines(options)]
            result = dataclasses.replace(plan, notes=[*flags, *plan.notes])
            describe = page.plan_page
            if options.html:
                write_page(options.html, pictures.plan_html({"this plan": result, **others}))
    _print(json.dumps(dataclasses.asdict(result)) if options.json else describe(result), options)
    return 0


def _print(text: str, options: RunOptions) -> None:
    print(text, flush=True)
    if options.html and not options.json:
        print(f"wrote {options.html}")


def _inspect(resolved: ResolvedExperiment, options: RunOptions) -> int:
    """Print the view that `--inspect` names; no weight is made and no accelerator is used."""
    is_page = options.inspect in ("parameters", "batches")
    expected = "--inspect=parameters or --inspect=batches with it"
    require(options.html is None or is_page, None, "--html", options.html, expected, UsageError)
    # Each view imports JAX or NumPy as late as it needs them.
    if options.inspect == "batches":
        from layerkit_runner.tools.inspect.batches import print_batches

        print_batches(resolved, options)
        return 0
    if options.inspect in ("layers", "parameters"):
        from layerkit_runner.tools.inspect import model

        text = getattr(model, f"describe_{options.inspect}")(resolved, options)
    else:
        from layerkit_runner.config.config_tree import printed_config

        text = printed_config(resolved, None, mode="inspect", as_json=options.json)
    _print(text, options)
    return 0


def _late(path: str) -> Callable[..., int]:
    """Return a function that imports the function `module:name` of a tool when it is called."""

    def run(*request: Any) -> int:
        module, _, name = path.partition(":")
        return getattr(importlib.import_module(f"layerkit_runner.tools.{module}"), name)(*request)

    return run


def _study(flags: ParsedFlags) -> int:
    from layerkit_runner.config.registry import find_experiment
    from layerkit_runner.run.resolve import check_folder, resolve_entry

    if importlib.util.find_spec("optuna") is None:
        hint = f"Install it: {pip_install('layerkit-runner', 'sweeps')}"
        raise UsageError("optuna is not installed", field="--study", hint=hint)
    from layerkit_runner.tools.sweep import run_study

    entry, reduced = find_experiment(flags.exp or ""), bool(flags.values.get("reduced"))
    check_folder(flags)
    return run_study(flags, lambda overrides: resolve_entry(entry, overrides, reduced=reduced))


PLAN = Mode("compile the training step without the devices; print memory and traffic", _plan)
INSPECT = Mode("print the configuration, weights or batches", _inspect)
TOP_LOGITS = Mode(
    "write the most likely tokens of a teacher at each position of the data, for distillation",
    _late("top_logits:write_top_logits"),
    flags=(Flag("k", positive, "number of tokens at each position", "K", default=64),),
)
DIFF_CONFIG = FlagCommand(_late("inspect.config_difference:run_diff_config"))
STUDY = FlagCommand(_study)
GENERATE = FlagCommand(_late("generate:run_generate"))
DOCTOR = Command(
    "check this machine: versions, memory, disk, devices; exit code 1 if a check fails",
    _late("doctor:run_doctor"),
)
LAUNCH = Command(
    "start a run on this machine or on Slurm; `runner launch` lists the kinds",
    _late("launch.command:run_launch"),
)
QUANTIZE = Command(
    "store the weights of a trained model in 8 or 4 bits",
    _late("quantize:run_quantize"),
)
REPORT = Command(
    "write curves, times, samples and configurations of runs as one HTML file",
    _late("report.command:run_report"),
)
STATUS = Command(
    "print state, speed, loss and last errors of runs", _late("report.command:run_status")
)
SCALING = Command(
    "plan runs of growing FLOPs, fit a scaling law, and predict and grade a larger run",
    _late("scaling.command:run_scaling"),
)
SCORE = Command("print perplexity and bits per byte of a text file", _late("score:run_score"))
