"""Metrics that SeqIO tasks define, from the scores and predictions of one evaluation.

A task has three kinds of metric functions: `(targets, scores)`, `(targets, predictions)` and
`(targets, predictions, aux_values)`. Targets and predictions are what its postprocessor makes of
the text. The targets are read once more from the data, one example at a time, and of each nothing
is kept but its postprocessed target; outputs come by the number of their example (`provenance`).

What does not fit is an error: an output for a row of padding or for no example, an example without
output. So a metric is that of the whole data set or there is none.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from layerkit_inputs.seqio_adaptor.example_stream import NumberedExample
from layerkit_inputs.seqio_adaptor.tasks import Refuse

_SHOWN = 5


def have_scores(tasks: list[Any]) -> bool:
    """Whether one of the tasks has metrics of scores."""
    return any(task.score_metric_fns for task in tasks)


def have_predictions(tasks: list[Any]) -> bool:
    """Whether one of the tasks has metrics of predictions."""
    return any(task.predict_metric_fns or task.predict_with_aux_metric_fns for task in tasks)


def check_metrics(task: Any, refuse: Refuse) -> None:
    """Refuses metrics of a kind that is not computed here.

    Raises:
      ValueError: the task has metric objects, or a function of other arguments.
    """
    try:
        functions = task.metric_fns
    except ValueError as error:
        raise refuse(f"task {task.name}: {error}") from None
    if len(task.metric_objs) > len(functions):
        raise refuse(
            f"task {task.name} has metric_objs, of which none are computed here. Give them as "
            "metric_fns, or set use_task_metrics=False."
        )


def score_metrics(
    examples: Iterable[NumberedExample], scores: Mapping[int, float], *, whole_epoch: bool
) -> dict[str, float]:
    """The `(targets, scores)` metrics.

    Args:
      examples: Those of one pass, in order.
      scores: By number of the example: log-probability of its targets.
      whole_epoch: Every example must have a score.

    Returns:
      Metric -> value; where there are several tasks, `task/metric`.

    Raises:
      ValueError: scores and examples do not correspond.
    """
    collected: dict[Any, dict[str, list[Any]]] = {}
    for number, task, example in _with_outputs(examples, scores, "scores", whole_epoch=whole_epoch):
        if task.score_metric_fns:
            columns = collected.setdefault(task, {"targets": [], "scores": []})
            columns["targets"].append(_target(task, example))
            columns["scores"].append(float(scores[number]))
    results = {
        task: _call(task, task.score_metric_fns, columns) for task, columns in collected.items()
    }
    return _by_name(results)


def prediction_metrics(
    examples: Iterable[NumberedExample],
    predictions: Mapping[int, Any],
    *,
    aux_values: Mapping[str, Mapping[int, Any]] | None,
    whole_epoch: bool,
) -> dict[str, float]:
    """The `(targets, predictions)` and `(targets, predictions, aux_values)` metrics.

    Args:
      examples: Those of one pass, in order.
      predictions: By number of the example: what the model said, as text.
      aux_values: Name -> by number of the example, what else it said; needed where a task has
        metrics of it.
      whole_epoch: Every example must have a prediction.

    Returns:
      Metric -> value; where there are several tasks, `task/metric`.

    Raises:
      ValueError: predictions and examples do not correspond, or auxiliary values are missing.
    """
    collected: dict[Any, dict[str, list[Any]]] = {}
    numbers: dict[Any, list[int]] = {}
    for number, task, example in _with_outputs(
        examples, predictions, "predictions", whole_epoch=whole_epoch
    ):
        if task.predict_metric_fns or task.predict_with_aux_metric_fns:
            columns = collected.setdefault(task, {"targets": [], "predictions": []})
            columns["targets"].append(_target(task, example))
            said = task.postprocess_fn(predictions[number], example=example, is_target=False)
            columns["predictions"].append(said)
            numbers.setdefault(task, []).append(number)
    results = {}
    for task, columns in collected.items():
        results[task] = _call(task, task.predict_metric_fns, columns)
        if task.predict_with_aux_metric_fns:
            aux = {"aux_values": _aux_columns(task, aux_values, numbers[task])}
            results[task] |= _call(task, task.predict_with_aux_metric_fns, columns | aux)
    return _by_name(results)


def _with_outputs(
    examples: Iterable[NumberedExample],
    outputs: Mapping[int, Any],
    what: str,
    *,
    whole_epoch: bool,
) -> Iterator[NumberedExample]:
    """The examples that have an output, once it is sure that the two correspond."""
    if padded := sum(number < 0 for number in outputs):
        raise ValueError(
            f"{what}: {padded} of rows of padding (provenance -1); leave out the rows whose "
            "eval_sample_weights are 0."
        )
    unused = set(outputs)
    without: list[int] = []
    for numbered in examples:
        if numbered.number in unused:
            unused.remove(numbered.number)
            yield numbered
        else:
            without.append(numbered.number)
        if not unused and not whole_epoch:
            return
    if unused:
        raise ValueError(
            f"{what}: {len(unused)} of examples that the data do not have, such as "
            f"{sorted(unused)[:_SHOWN]}."
        )
    if without and whole_epoch:
        raise ValueError(
            f"{what}: {len(without)} examples have none, such as {without[:_SHOWN]}; every example "
            "must be there once."
        )


def _target(task: Any, example: Mapping[str, Any]) -> Any:
    """What the task's metrics compare with, from the text of the example's targets."""
    text = example.get("targets_pretokenized")
    if text is None:
        vocabulary = task.output_features["targets"].vocabulary
        text = vocabulary.decode([int(token) for token in example["targets"]])
    if isinstance(text, bytes):
        text = text.decode("utf-8")
    return task.postprocess_fn(text, example=example, is_target=True)


def _aux_columns(
    task: Any, aux_values: Mapping[str, Mapping[int, Any]] | None, numbers: Sequence[int]
) -> dict[str, list[Any]]:
    if not aux_values:
        raise ValueError(
            f"task {task.name} has metrics of auxiliary values, but there are none; pass "
            "aux_values, or set use_task_metrics=False."
        )
    return {name: [column[number] for number in numbers] for name, column in aux_values.items()}


def _call(
    task: Any, functions: Iterable[Callable[..., Any]], columns: Mapping[str, Any]
) -> dict[str, float]:
    """What the functions return together, as numbers."""
    results: dict[str, float] = {}
    for function in functions:
        returned = function(**columns)
        if not returned:
            raise ValueError(f"task {task.name}: {function.__name__} returned no metrics.")
        for name, value in returned.items():
            if name in results:
                raise ValueError(f"task {task.name}: two metric functions return {name!r}.")
            number = _as_number(value)
            if number is None:
                logging.getLogger(__name__).warning(
                    "task %s: metric %r is a %s, no number, and is left out",
                    task.name,
                    name,
                    type(value).__name__,
                )
            else:
                results[name] = number
    return results


def _as_number(value: Any) -> float | None:
    """A number, also one in clu's `Scalar`; None for texts, histograms and the like."""
    try:
        return float(getattr(value, "value", value))
    except (TypeError, ValueError):
        return None


def _by_name(results: Mapping[Any, Mapping[str, float]]) -> dict[str, float]:
    several = len(results) > 1
    return {
        f"{task.name}/{name}" if several else name: value
        for task, metrics in results.items()
        for name, value in metrics.items()
    }
