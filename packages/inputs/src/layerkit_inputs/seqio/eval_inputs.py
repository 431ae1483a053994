"""Configs of one evaluation input per SeqIO task."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

from layerkit.config import Config
from layerkit.config.checks import check_choice, require
from layerkit_inputs.seqio.eval_metrics import OutputKind, metric_functions
from layerkit_inputs.seqio.seqio_input import SeqIOInput
from layerkit_inputs.seqio.tasks import find_provider, import_seqio

MetricType = Literal["score", "predict"]
"""Kind of metrics of a task: of the scores of its targets, or of decoded predictions."""

_OWNER = "get_eval_hparams_for_seqio"


def get_eval_hparams_for_seqio(
    task_or_mixture_name: Any,
    *,
    feature_lengths: Mapping[str, int],
    metric_type: MetricType,
    split_name: str | Callable[[str], str] = "validation",
    require_metric_fns: bool = True,
    check_split_exists: bool = False,
    **fields: Any,
) -> list[Config]:
    """Return configs of `SeqIOInput`, one for each task of a mixture, as Pax's function does.

    Use those of `score` in `datasets()`, and those of `predict` in `decode_datasets()`. Inputs of
    `score` are rows of a language model with weights on targets only, those of `predict` are
    prompts. Each is named after its task.

    Args:
      task_or_mixture_name: Registered name of a task or mixture, or the object itself.
      feature_lengths: Field `task_feature_lengths` of the inputs.
      metric_type: Kind of metrics to compute.
      split_name: Name of the split, or a function from the name of a task to it.
      require_metric_fns: True to leave out tasks without metrics of that kind, with a warning.
      check_split_exists: True to leave out tasks without the split, with a warning. False: building
        their inputs raises.
      **fields: Further fields of the inputs, such as `percore_batch_size`, `feature_converter`,
        `input_random_seed`, and `reset_for_eval` with `eval_loop_num_batches`.

    Raises:
      ConfigError: The task or mixture does not exist, `metric_type` is unknown, or no task is left.
    """
    check_choice(_OWNER, get_args(MetricType), metric_type=metric_type)
    seqio = import_seqio()
    provider = find_provider(task_or_mixture_name)
    kind: OutputKind = "scores" if metric_type == "score" else "predictions"
    defaults: dict[str, Any] = {"feature_converter": "prompts"}
    if metric_type == "score":
        defaults = {"feature_converter": "language_model", "weights_on_targets_only": True}
    configs = []
    for task in seqio.get_subtasks(provider):
        split = split_name(task.name) if callable(split_name) else split_name
        reason = None
        if require_metric_fns and not metric_functions(task, kind):
            reason = f"it has no metrics of kind {metric_type!r}"
        elif check_split_exists and split not in task.splits:
            reason = f"it has no split {split!r}"
        if reason is not None:
            logging.getLogger(__name__).warning("not evaluating task %s: %s", task.name, reason)
            continue
        is_registered = task.name in seqio.TaskRegistry.names()
        is_registered = is_registered and seqio.TaskRegistry.get(task.name) is task
        source = {"mixture_name": task.name} if is_registered else {"mixture_or_task": task}
        values = {"name": task.name, "split_name": split, **defaults, **source, **fields}
        lengths = dict(feature_lengths)
        configs.append(SeqIOInput.HParams.config(task_feature_lengths=lengths, **values))
    expected = "a task to evaluate; the log says why each task was left out"
    require(configs, _OWNER, "task_or_mixture_name", provider.name, expected)
    return configs
