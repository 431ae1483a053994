"""Metrics of SeqIO tasks, from the scores and predictions of one evaluation.

A task has three kinds of metric functions: `(targets, scores)`, `(targets, predictions)` and
`(targets, predictions, aux_values)`. Targets and predictions are postprocessed by the task. The
targets are read from the data again, one example at a time, and only the postprocessed target is
kept. Outputs are keyed by the number of their example (`provenance`).

An output for padding or for an unknown example is an error. An example without output is one too if
the evaluation reads a whole epoch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from layerkit.errors import ConfigError
from layerkit_inputs.seqio.example_stream import NumberedExample

_SHOWN = 5

# A metric function and its arguments.
_Call = tuple[Callable[..., Any], Mapping[str, Any]]


def have_scores(tasks: list[Any]) -> bool:
    """Return True if any task has metrics of scores."""
    return any(map(_has_scores, tasks))


def have_predictions(tasks: list[Any]) -> bool:
    """Return True if any task has metrics of predictions."""
    return any(map(_has_predictions, tasks))


def _has_scores(task: Any) -> bool:
    return bool(task.score_metric_fns)


def _has_predictions(task: Any) -> bool:
    return bool(task.predict_metric_fns or task.predict_with_aux_metric_fns)


def check_metrics(task: Any, owner: str) -> None:
    """Raise `ConfigError` if a task has metric objects, or functions of unsupported arguments."""
    try:
        functions = task.metric_fns
    except ValueError as error:
        raise ConfigError(str(error), owner=f"{owner}: task {task.name}") from None
    if len(task.metric_objs) > len(functions):
        raise ConfigError(
            "metric objects are not supported",
            owner=f"{owner}: task {task.name}",
            field="metric_objs",
            hint="Use metric_fns, or set use_task_metrics=False.",
        )


def score_metrics(
    tasks: list[Any],
    examples: Iterable[NumberedExample],
    scores: Mapping[int, float],
    *,
    whole_epoch: bool,
) -> dict[str, float]:
    """Compute the `(targets, scores)` metrics.

    Args:
      tasks: All tasks of the input.
      examples: Examples of one pass, in order.
      scores: Log-probability of the targets by example number.
      whole_epoch: True if every example must have a score.

    Returns:
      Values by metric name, or by `task/metric` if several tasks have such metrics.

    Raises:
      ConfigError: The numbers of scores and examples differ.
    """
    collected: dict[Any, dict[str, list[Any]]] = {}
    for number, task, example in _with_outputs(examples, scores, "scores", whole_epoch=whole_epoch):
        if _has_scores(task):
            columns = collected.setdefault(task, {"targets": [], "scores": []})
            columns["targets"].append(_target(task, example))
            columns["scores"].append(float(scores[number]))
    results = {
        task: _call(task, [(function, columns) for function in task.score_metric_fns])
        for task, columns in collected.items()
    }
    return _by_name(results, several=sum(map(_has_scores, tasks)) > 1)


def prediction_metrics(
    tasks: list[Any],
    examples: Iterable[NumberedExample],
    predictions: Mapping[int, Any],
    *,
    aux_values: Mapping[str, Mapping[int, Any]] | None,
    whole_epoch: bool,
) -> dict[str, float]:
    """Compute the `(targets, predictions)` and `(targets, predictions, aux_values)` metrics.

    Args:
      tasks: All tasks of the input.
      examples: Examples of one pass, in order.
      predictions: Predicted text by example number.
      aux_values: Auxiliary outputs of the model by name and example number. Required if a task has
        metrics of them.
      whole_epoch: True if every example must have a prediction.

    Returns:
      Values by metric name, or by `task/metric` if several tasks have such metrics.

    Raises:
      ConfigError: The numbers of predictions and examples differ, or auxiliary values are missing.
    """
    collected: dict[Any, dict[str, list[Any]]] = {}
    numbers: dict[Any, list[int]] = {}
    for number, task, example in _with_outputs(
        examples, predictions, "predictions", whole_epoch=whole_epoch
    ):
        if _has_predictions(task):
            columns = collected.setdefault(task, {"targets": [], "predictions": []})
            columns["targets"].append(_target(task, example))
            said = task.postprocess_fn(predictions[number], example=example, is_target=False)
            columns["predictions"].append(said)
            numbers.setdefault(task, []).append(number)
    results = {}
    for task, columns in collected.items():
        calls: list[_Call] = [(function, columns) for function in task.predict_metric_fns]
        if task.predict_with_aux_metric_fns:
            aux = columns | {"aux_values": _aux_columns(task, aux_values, numbers[task])}
            calls += [(function, aux) for function in task.predict_with_aux_metric_fns]
        results[task] = _call(task, calls)
    return _by_name(results, several=sum(map(_has_predictions, tasks)) > 1)


def _with_outputs(
    examples: Iterable[NumberedExample], outputs: Mapping[int, Any], what: str, *, whole_epoch: bool
) -> Iterator[NumberedExample]:
    """Yield the examples that have an output; raise if the two do not correspond."""
    if padded := sum(number < 0 for number in outputs):
        raise ConfigError(
            f"{padded} outputs are of padding (provenance -1)",
            field=what,
            hint="Remove the rows whose eval_sample_weights are 0.",
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
        numbers = sorted(unused)[:_SHOWN]
        raise ConfigError(f"{len(unused)} outputs of unknown examples", field=what, value=numbers)
    if without and whole_epoch:
        numbers = without[:_SHOWN]
        raise ConfigError(f"{len(without)} examples have no output", field=what, value=numbers)


def _target(task: Any, example: Mapping[str, Any]) -> Any:
    """Return the postprocessed target of an example."""
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
        raise ConfigError(
            owner=f"task {task.name}",
            field="aux_values",
            value=aux_values,
            expected="auxiliary values, which a metric of the task needs",
            hint="Pass aux_values, or set use_task_metrics=False.",
        )
    for name, column in aux_values.items():
        if without := [number for number in numbers if number not in column]:
            raise ConfigError(
                f"{len(without)} examples have no value",
                owner=f"task {task.name}",
                field=f"aux_values[{name!r}]",
                value=without[:_SHOWN],
            )
    return {name: [column[number] for number in numbers] for name, column in aux_values.items()}


def _call(task: Any, calls: Iterable[_Call]) -> dict[str, float]:
    """Return the merged results of calls of metric functions, as numbers."""
    results: dict[str, float] = {}
    for function, columns in calls:
        returned = function(**columns)
        if not returned:
            name = getattr(function, "__name__", type(function).__name__)
            raise ConfigError(f"{name} returned no metrics", owner=f"task {task.name}")
        for name, value in returned.items():
            if name in results:
                problem = f"two metric functions return {name!r}"
                raise ConfigError(problem, owner=f"task {task.name}")
            number = _as_number(value)
            if number is None:
                logging.getLogger(__name__).warning(
                    "task %s: skipping metric %r, which is a %s and not a number",
                    task.name,
                    name,
                    type(value).__name__,
                )
            else:
                results[name] = number
    return results


def _as_number(value: Any) -> float | None:
    """Return a number or the number in a clu `Scalar`; None for text, histograms and others."""
    try:
        return float(getattr(value, "value", value))
    except (TypeError, ValueError):
        return None


def _by_name(results: Mapping[Any, Mapping[str, float]], *, several: bool) -> dict[str, float]:
    return {
        f"{task.name}/{name}" if several else name: value
        for task, metrics in results.items()
        for name, value in metrics.items()
    }
