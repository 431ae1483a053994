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
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from layerkit.config.checks import require
from layerkit.errors import ConfigError
from layerkit_inputs.seqio.example_stream import NumberedExample

_SHOWN = 5

# Values of the examples of a task, by argument of its metric functions.
_Columns = dict[str, list[Any]]


def has_scores(task: Any) -> bool:
    """Return True if a task has metrics of scores."""
    return bool(task.score_metric_fns)


def has_predictions(task: Any) -> bool:
    """Return True if a task has metrics of predictions."""
    return bool(task.predict_metric_fns or task.predict_with_aux_metric_fns)


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
    measured = [task for task in tasks if has_scores(task)]
    columns_of: dict[Any, _Columns] = {}
    for number, task, example in _join(examples, scores, "scores", whole_epoch=whole_epoch):
        if task in measured:
            columns = columns_of.setdefault(task, {"targets": [], "scores": []})
            columns["targets"].append(_target(task, example))
            columns["scores"].append(float(scores[number]))
    results = {
        task: _call(task, [(function, columns) for function in task.score_metric_fns])
        for task, columns in columns_of.items()
    }
    return _merge_names(results, several=len(measured) > 1)


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
    measured = [task for task in tasks if has_predictions(task)]
    columns_of: dict[Any, _Columns] = {}
    aux_of: dict[Any, dict[str, list[Any]]] = {}
    joined = _join(examples, predictions, "predictions", whole_epoch=whole_epoch)
    for number, task, example in joined:
        if task not in measured:
            continue
        columns = columns_of.setdefault(task, {"targets": [], "predictions": []})
        columns["targets"].append(_target(task, example))
        said = task.postprocess_fn(predictions[number], example=example, is_target=False)
        columns["predictions"].append(said)
        if task.predict_with_aux_metric_fns:
            owner, expected = f"task {task.name}", "auxiliary values, which a metric needs"
            require(aux_values, owner, "aux_values", aux_values, expected)
            for name, values in (aux_values or {}).items():
                aux_of.setdefault(task, {}).setdefault(name, []).append(values[number])
    results = {}
    for task, columns in columns_of.items():
        with_aux = {**columns, "aux_values": aux_of.get(task, {})}
        results[task] = _call(
            task,
            [
                *((function, columns) for function in task.predict_metric_fns),
                *((function, with_aux) for function in task.predict_with_aux_metric_fns),
            ],
        )
    return _merge_names(results, several=len(measured) > 1)


def _join(
    examples: Iterable[NumberedExample], outputs: Mapping[int, Any], what: str, *, whole_epoch: bool
) -> Iterator[NumberedExample]:
    """Yield the examples that have an output; raise if the two do not correspond."""
    unused = set(outputs)
    missing: list[int] = []
    for numbered in examples:
        if numbered.number in unused:
            unused.remove(numbered.number)
            yield numbered
        else:
            missing.append(numbered.number)
        if not unused and not whole_epoch:
            return
    if unused:
        problem = f"{len(unused)} outputs of unknown examples, or of padding"
        raise ConfigError(problem, field=what, value=sorted(unused)[:_SHOWN])
    if missing and whole_epoch:
        problem = f"{len(missing)} examples have no output"
        raise ConfigError(problem, field=what, value=missing[:_SHOWN])


def _target(task: Any, example: Mapping[str, Any]) -> Any:
    """Return the postprocessed target of an example."""
    text = example.get("targets_pretokenized")
    if text is None:
        vocabulary = task.output_features["targets"].vocabulary
        text = vocabulary.decode([int(token) for token in example["targets"]])
    if isinstance(text, bytes):
        text = text.decode("utf-8")
    return task.postprocess_fn(text, example=example, is_target=True)


def _call(
    task: Any, calls: Iterable[tuple[Callable[..., Any], Mapping[str, Any]]]
) -> dict[str, float]:
    """Return the merged results of calls of metric functions, as numbers."""
    results: dict[str, float] = {}
    for function, columns in calls:
        for name, value in function(**columns).items():
            if name in results:
                problem = f"two metric functions return {name!r}"
                raise ConfigError(problem, owner=f"task {task.name}")
            try:
                # A clu `Scalar` holds its number.
                results[name] = float(getattr(value, "value", value))
            except (TypeError, ValueError):  # text, histograms and others
                logging.getLogger(__name__).warning(
                    "task %s: skipping metric %r, which is a %s and not a number",
                    task.name,
                    name,
                    type(value).__name__,
                )
    return results


def _merge_names(results: Mapping[Any, Mapping[str, float]], *, several: bool) -> dict[str, float]:
    return {
        f"{task.name}/{name}" if several else name: value
        for task, metrics in results.items()
        for name, value in metrics.items()
    }
