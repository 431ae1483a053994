"""LmEvalProgram: scores of a model on tasks of EleutherAI's lm-evaluation-harness.

Every process runs the harness on the same requests and computes its rows of a batch.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from layerkit.config import Config, target_of
from layerkit.config.checks import check_sizes
from layerkit.errors import pip_install
from layerkit_runner.config.config_tree import check_class
from layerkit_runner.errors import UsageError, as_usage_error
from layerkit_runner.files.atomic_write import atomic_write
from layerkit_runner.observers import Observer
from layerkit_runner.run.job import Job
from layerkit_runner.run.model.generation import find_tokenizer
from layerkit_runner.run.model.harness import as_harness_model
from layerkit_runner.run.model.loaded_model import LoadedModel
from layerkit_runner.run.programs import model_calls
from layerkit_runner.run.programs.eval_program import BaseProgram
from layerkit_runner.step.train_state import TrainState

_DEFAULT_LENGTH = 2048  # as in the harness
_ROWS_PER_SHARD = 16
# Flags of the mode, which are arguments of the program.
_FLAGS = ("include_path", "num_fewshot", "limit", "batch_size", "max_length", "seed")


class LmEvalProgram(BaseProgram):
    """A program that scores the model on tasks; see docs/evaluation.md.

    `BaseExperiment.lm_eval_tasks` lists configs of it. The job sets `job`.

    Args:
      tasks: Names of tasks, groups and tags, patterns such as `arc_*`, or YAML files.
      name: Unique name in outputs and metrics, `NAME/TASK/METRIC`.
      interval_steps: Number of steps between two runs; None for `eval_interval_steps`.
      include_path: Folder of further task files; None for those of the harness.
      batch_size: Largest number of rows of a batch; None for 16 for each shard of the rows.
      max_length: Largest number of tokens that the model reads; None for the length of the model
        or of its training data. Longer contexts lose their beginning.
      apply_chat_template: True to ask in messages of a chat, by the template of the experiment or
        tokenizer; or the name or file of a template.
      seed: Seed of the choice of examples and of sampled continuations.
      **options: Further arguments of `lm_eval.simple_evaluate`, such as `num_fewshot` (examples
        before each question) and `limit` (documents of each task; below 1: their share).
    """

    def __init__(
        self,
        job: Job,
        tasks: Sequence[str],
        name: str = "lm_eval",
        *,
        interval_steps: int | None = None,
        include_path: str | None = None,
        batch_size: int | None = None,
        max_length: int | None = None,
        apply_chat_template: bool | str = False,
        seed: int = 0,
        **options: Any,
    ) -> None:
        """Find the tasks, and read their data."""
        folder = job.directory / "eval"
        super().__init__(
            job.task, job.partitioner, None, name, folder, interval_steps=interval_steps
        )
        check_sizes(name, batch_size=batch_size, max_length=max_length)
        self._job = job
        self._model: LoadedModel | None = None
        find_tokenizer(job.resolved, job.partitioner)  # raises if there is none
        self._tasks = load_tasks(tasks, include_path)
        template = apply_chat_template if isinstance(apply_chat_template, str) else None
        self._about_model = {
            "max_length": max_length or context_length(job),
            "batch_size": batch_size or _ROWS_PER_SHARD * job.partitioner.num_batch_shards(),
            "chat_template_name": template,
            "seed": seed,
        }
        seeds = ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed")
        self._options = {
            **dict.fromkeys(seeds, seed),
            "apply_chat_template": bool(apply_chat_template),
            "log_samples": False,
            **options,
        }

    def run(self, state: TrainState, step: int, observers: Observer) -> dict[str, float]:
        """Score the weights; report and return `TASK/METRIC`, standard errors and `TASK/n`."""
        from lm_eval.evaluator import simple_evaluate
        from lm_eval.utils import handle_non_serializable, make_table

        if self._model is None:  # its compiled functions serve all later runs
            path = str(self._job.directory)
            self._model = LoadedModel(self._job, state, path=path, step=step)
        self._model.state, self._model.step = state.for_inference(), step
        harness_model = as_harness_model(self._model, **self._about_model)
        with as_usage_error(ValueError, owner=self.name):
            results = simple_evaluate(harness_model, tasks=self._tasks, **self._options)
        del self._model.state  # the next step takes over its arrays
        if jax.process_index() == 0 and self.folder is not None:
            text = json.dumps(results, default=handle_non_serializable, indent=1)
            atomic_write(self.folder / self.name / f"results_{step:08d}.json", text + "\n")
        cut, length = harness_model.num_truncated, harness_model.max_length
        observers.message(
            f"{self.name} | step {step} | contexts of at most {length} tokens; {cut} requests lost"
            f" the beginning of longer ones\n{make_table(results)}"
        )
        self.metrics = task_metrics(results)
        observers.eval_metrics(step, self.name, self.metrics)
        return self.metrics


def task_metrics(results: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of the harness' results by name, such as `arc_easy/acc_stderr`.

    The name of a filter follows a slash unless it is `none`. `n` is the number of documents.
    """
    metrics: dict[str, float] = {}
    for task, values in results["results"].items():
        for key, value in values.items():
            metric, _, filter_name = key.partition(",")
            if filter_name and isinstance(value, int | float):
                end = "" if filter_name == "none" else f"/{filter_name}"
                metrics[f"{task}/{metric}{end}"] = float(value)
        if task in results["n-samples"]:
            metrics[f"{task}/n"] = float(results["n-samples"][task]["effective"])
    return metrics


def load_tasks(names: Sequence[str], include_path: str | None) -> list[Any]:
    """Return tasks and groups of the harness with their data.

    Raises:
      UsageError: The harness is not installed, a name is unknown, or data cannot be read.
    """
    try:
        from lm_eval.tasks import TaskManager
    except ModuleNotFoundError as error:
        hint = f"Install it: {pip_install('layerkit-runner', 'eval')}"
        raise UsageError("lm-evaluation-harness is not installed", hint=hint) from error
    if include_path is not None and not Path(include_path).is_dir():
        expected = "a folder of task files (.yaml)"
        raise UsageError(field="include_path", value=include_path, expected=expected)
    # It would fork this process, whose threads of JAX may hold locks, to resample metrics.
    os.environ.setdefault("DISABLE_MULTIPROC", "1")
    # The 14,000 tasks of the harness are indexed only if they are needed.
    for include_defaults in (False, True):
        manager = TaskManager(include_path=include_path, include_defaults=include_defaults)
        specs = {n: [n] if Path(n).is_file() else manager.match_tasks([n]) for n in names}
        unknown = [name for name, matches in specs.items() if not matches]
        if not unknown:
            break
    else:
        raise UsageError("unknown task", field="tasks", value=unknown[0], choices=manager.all_tasks)
    with as_usage_error(ValueError, OSError, owner=", ".join(names)):
        loaded = manager.load([*dict.fromkeys(itertools.chain.from_iterable(specs.values()))])
    inner = set(itertools.chain.from_iterable(loaded["group_map"].values()))
    parts = {**loaded["groups"], **loaded["tasks"]}
    return [part for name, part in parts.items() if name not in inner]


def context_length(job: Job) -> int:
    """Return the number of tokens that a model reads: that of its positions or training rows."""
    if (folder := getattr(job.resolved.experiment, "FOLDER", None)) is not None:
        from layerkit.interop import hugging_face

        return hugging_face.max_length(folder) or _DEFAULT_LENGTH
    batches = [target_of(one).blank_batch(one, 1) for one in job.resolved.datasets]
    rows = [batch.ids.shape[1] for batch in batches if batch is not None and "ids" in batch]
    positions = model_calls.max_positions(job.resolved.task.model)
    return positions or next(iter(rows), _DEFAULT_LENGTH)


def lm_eval_programs(job: Job) -> list[BaseProgram]:
    """Build the programs of `BaseExperiment.lm_eval_tasks`, or one of `--tasks`, with the flags."""
    options, configs = job.options, job.resolved.lm_eval_tasks or []
    if options.tasks is not None:
        configs = [Config(LmEvalProgram, tasks=list(options.tasks))]
    if not configs:
        expected = "names of tasks, or a method lm_eval_tasks() of the experiment"
        raise UsageError(field="--tasks", value=None, expected=expected)
    values = {name: value for name in _FLAGS if (value := getattr(options, name))}
    if options.apply_chat_template is not None:
        values["apply_chat_template"] = options.apply_chat_template
    for index, config in enumerate(configs):
        check_class(config, f"lm_eval_tasks.{index}", LmEvalProgram)
    programs = [config.Instantiate(job=job, **values) for config in configs]
    if len(names := {program.name for program in programs}) < len(programs):
        expected = "a different name for each program"
        raise UsageError(
            owner="lm_eval_tasks", field="name", value=sorted(names), expected=expected
        )
    return programs
