"""Metrics of SeqIO tasks, from the scores and predictions of one evaluation.

A task has metric functions `(targets, scores)` and `(targets, predictions)`. Targets and
predictions are postprocessed by the task. The targets are read from the data again, one example at
a time, and only the postprocessed target is kept. Outputs are keyed by the number of their example
(`provenance`).

An output for padding or for an unknown example is an error. An example without output is one too if
the evaluation reads a whole epoch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

from layerkit.errors import ConfigError
from layerkit_inputs.seqio.example_stream import NumberedExample

OutputKind = Literal["scores", "predictions"]
"""Outputs of a model: the log-probabilities of targets, or text."""

_SHOWN = 5


def metric_functions(task: Any, kind: OutputKind) -> list[Callable[..., Mapping[str, Any]]]:
    """Return the metric functions of a task that read outputs of a kind."""
    return list(task.score_metric_fns if kind == "scores" else task.predict_metric_fns)


def task_metrics(
    tasks: list[Any],
    examples: Iterable[NumberedExample],
    outputs: Mapping[int, Any],
    *,
    kind: OutputKind,
    whole_epoch: bool,
) -> dict[str, float]:
    """Compute the metrics of one kind of outputs.

    Args:
      tasks: All tasks of the input.
      examples: Examples of one pass, in order.
      outputs: Log-probability of the targets, or predicted text, by example number.
      kind: Kind of the outputs.
      whole_epoch: True if every example must have an output.

    Returns:
      Values by metric name, or by `task/metric` if several tasks have such metrics.

    Raises:
      ConfigError: The numbers of outputs and examples differ, or two metrics have one name.
    """
    measured = [task for task in tasks if metric_functions(task, kind)]
    columns_of: dict[Any, dict[str, list[Any]]] = {}
    for number, task, example in _join(examples, outputs, kind, whole_epoch=whole_epoch):
        if task not in measured:
            continue
        output = outputs[number]
        if kind == "scores":
            output = float(output)
        else:
            output = task.postprocess_fn(output, example=example, is_target=False)
        columns = columns_of.setdefault(task, {"targets": [], kind: []})
        columns["targets"].append(_target(task, example))
        columns[kind].append(output)
    results: dict[str, float] = {}
    for task, columns in columns_of.items():
        for function in metric_functions(task, kind):
            for name, value in function(**columns).items():
                key = f"{task.name}/{name}" if len(measured) > 1 else name
                if key in results:
                    problem = f"two metric functions return {name!r}"
                    raise ConfigError(problem, owner=f"task {task.name}")
                try:
                    # A clu `Scalar` holds its number.
                    results[key] = float(getattr(value, "value", value))
                except (TypeError, ValueError):  # text, histograms and others
                    logging.getLogger(__name__).warning(
                        "task %s: skipping metric %r, which is a %s and not a number",
                        task.name,
                        name,
                        type(value).__name__,
                    )
    return results


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
