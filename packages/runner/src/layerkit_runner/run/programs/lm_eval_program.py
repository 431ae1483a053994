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
from layerkit.config.checks import check_choice, check_sizes, require
from layerkit.errors import pip_install
from layerkit_inputs.chat.template import load_chat_template
from layerkit_runner.config.config_tree import check_class
from layerkit_runner.errors import UsageError, as_usage_error
from layerkit_runner.files.atomic_write import atomic_write
from layerkit_runner.observers import Observer
from layerkit_runner.run.job import Job
from layerkit_runner.run.model.generation import find_tokenizer
from layerkit_runner.run.model.harness import HarnessModel
from layerkit_runner.run.model.loaded_model import LoadedModel
from layerkit_runner.run.programs import model_calls
from layerkit_runner.run.programs.eval_program import BaseProgram
from layerkit_runner.step.train_state import TrainState

_DEFAULT_LENGTH = 2048  # as in the harness
_ROWS_PER_SHARD = 16
_FLAGS = (
    *("include_path", "num_fewshot", "limit", "batch_size", "max_length", "apply_chat_template"),
    "seed",
)
# Arguments of the harness. Its caches are not among them, since they do not know the weights.
_OPTIONS = (
    *("num_fewshot", "limit", "samples", "bootstrap_iters", "system_instruction", "gen_kwargs"),
    *("fewshot_as_multiturn", "log_samples", "confirm_run_unsafe_code"),
)


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
        """Find the tasks, read their data, and check the options."""
        folder, steps = job.directory / "eval", interval_steps
        super().__init__(job.task, job.partitioner, None, name, folder, interval_steps=steps)
        check_sizes(name, batch_size=batch_size)
        for option in options:
            check_choice(name, _OPTIONS, option=option)
        tokenizer = find_tokenizer(job.resolved, job.partitioner)
        self._length = context_length(job, max_length)
        self._tasks = load_tasks(tasks, include_path, self._length, options.get("gen_kwargs"))
        self._template = None
        if apply_chat_template:
            template = None if apply_chat_template is True else apply_chat_template
            template = template or job.resolved.experiment.chat_template()
            self._template = load_chat_template(template, tokenizer)
            if not hasattr(tokenizer, "encode_with_offsets"):
                text = "special tokens that the chat template writes are encoded as text"
                job.observers.message(f"{name}: {text}")
        self._batch_size = batch_size or _ROWS_PER_SHARD * job.partitioner.num_batch_shards()
        seeds = ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed")
        self._options = {"log_samples": False, **dict.fromkeys(seeds, seed), **options}
        self._job, self._seed = job, seed
        self._model: LoadedModel | None = None

    def run(self, state: TrainState, step: int, observers: Observer) -> dict[str, float]:
        """Score the weights; report and return `TASK/METRIC`, standard errors and `TASK/n`."""
        from lm_eval.api.model import TemplateLM
        from lm_eval.evaluator import simple_evaluate
        from lm_eval.utils import handle_non_serializable, make_table

        # The compiled functions of the model serve all later runs.
        model = self._model or LoadedModel(self._job, state, path=str(self.folder), step=step)
        self._model, model.state, model.step = model, state.for_inference(), step
        harness_class: Any = type("LayerkitModel", (HarnessModel, TemplateLM), {})
        harness = harness_class(model, self._length, self._batch_size, self._template, self._seed)
        options = {**self._options, "apply_chat_template": self._template is not None}
        with as_usage_error(ValueError, owner=self.name):
            results = simple_evaluate(harness, tasks=self._tasks, **options)
        del model.state  # the next step takes over its arrays
        if jax.process_index() == 0 and self.folder is not None:
            text = json.dumps(results, default=handle_non_serializable, indent=1)
            atomic_write(self.folder / self.name / f"results_{step:08d}.json", text + "\n")
        observers.message(
            f"{self.name} | step {step} | contexts of at most {self._length} tokens;"
            f" {harness.num_truncated} requests lost the beginning of longer ones\n"
            f"{make_table(results)}"
        )
        self.metrics = _metrics(results)
        observers.eval_metrics(step, self.name, self.metrics)
        return self.metrics


def _metrics(results: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of the harness' results by name, such as `arc_easy/acc_stderr`."""
    metrics = {f"{t}/n": float(n["effective"]) for t, n in results["n-samples"].items()}
    for task, values in results["results"].items():
        for key, value in values.items():
            metric, _, filter_name = key.partition(",")
            if filter_name and isinstance(value, int | float):
                name = metric if filter_name == "none" else f"{metric}/{filter_name}"
                metrics[f"{task}/{name}"] = float(value)
    return metrics


def load_tasks(
    names: Sequence[str], include_path: str | None, max_length: int, gen_kwargs: Any = None
) -> list[Any]:
    """Return tasks and groups of the harness with their data.

    Raises:
      UserError: The harness is not installed, a name is unknown, data cannot be read, or answers
        may be as long as `max_length`.
    """
    try:
        from lm_eval.models.utils import normalize_gen_kwargs
        from lm_eval.tasks import TaskManager
        from lm_eval.utils import simple_parse_args_string
    except ModuleNotFoundError as error:
        hint = f"Install it: {pip_install('layerkit-runner', 'eval')}"
        raise UsageError("lm-evaluation-harness is not installed", hint=hint) from error
    is_folder = include_path is None or Path(include_path).is_dir()
    require(is_folder, None, "include_path", include_path, "a folder of task files (.yaml)")
    # It would fork this process, whose threads of JAX may hold locks, to resample metrics.
    os.environ.setdefault("DISABLE_MULTIPROC", "1")
    os.environ["LOCAL_RANK"] = "0"  # torchrun sets it; other ranks would get no results
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
    extra = simple_parse_args_string(gen_kwargs) if isinstance(gen_kwargs, str) else gen_kwargs
    for name, task in loaded["tasks"].items():
        if task.OUTPUT_TYPE == "generate_until":
            options = {**(task.config.generation_kwargs or {}), **(extra or {})}
            size = normalize_gen_kwargs(options)["max_gen_toks"]
            expected = f"more than the {size} new tokens of an answer (max_gen_toks)"
            require(size < max_length, name, "max_length", max_length, expected)
    inner = set(itertools.chain.from_iterable(loaded["group_map"].values()))
    parts = {**loaded["groups"], **loaded["tasks"]}
    return [part for name, part in parts.items() if name not in inner]


def context_length(job: Job, max_length: int | None) -> int:
    """Return the number of tokens that a model reads: that of its positions or training rows.

    `max_length` replaces it. The model must have so many positions, and no encoder.
    """
    model, positions = job.task.model, model_calls.max_positions(job.resolved.task.model)
    expected = "a language model without an encoder"
    require(not model_calls.has_source(model), None, "model", type(model).__name__, expected)
    if max_length is not None:
        expected = f"from 1 to {positions or 'any number'}, the positions of the model"
        fits = 0 < max_length <= (positions or max_length)
        require(fits, None, "max_length", max_length, expected)
        return max_length
    datasets, folder = job.resolved.datasets, getattr(job.resolved.experiment, "FOLDER", None)
    if folder is not None and not datasets:  # the model of a Hugging Face folder
        from layerkit.interop import hugging_face

        return hugging_face.max_length(folder) or _DEFAULT_LENGTH
    batches = [target_of(one).blank_batch(one, 1) for one in datasets]
    rows = [batch.ids.shape[1] for batch in batches if batch is not None and "ids" in batch]
    experiment = job.resolved.experiment
    named = getattr(experiment, experiment.stage_fields.get("row_length", ""), None)
    return positions or max(rows, default=named or _DEFAULT_LENGTH)


def lm_eval_programs(job: Job) -> list[BaseProgram]:
    """Build the programs of `BaseExperiment.lm_eval_tasks`, or one of `--tasks`, with the flags."""
    options, configs = job.options, job.resolved.lm_eval_tasks or []
    if options.tasks is not None:
        configs = [Config(LmEvalProgram, tasks=list(options.tasks))]
    expected = "names of tasks, or a method lm_eval_tasks() of the experiment"
    require(configs, None, "--tasks", None, expected)
    flags = {name: value for name in _FLAGS if (value := getattr(options, name)) is not None}
    for index, config in enumerate(configs):
        check_class(config, f"lm_eval_tasks.{index}", LmEvalProgram)
    programs = [config.Instantiate(job=job, **flags) for config in configs]
    names = sorted({program.name for program in programs})
    expected = "a different name for each program"
    require(len(names) == len(programs), "lm_eval_tasks", "name", names, expected)
    return programs
