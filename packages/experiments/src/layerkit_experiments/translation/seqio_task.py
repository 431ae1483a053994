"""A SeqIO task of translated text, which imports SeqIO when it is built."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from layerkit_experiments.recipes.published_data.seqio_tasks import vocabulary
from layerkit_inputs.seqio.tasks import import_seqio, import_tensorflow
from layerkit_inputs.text.text_pairs import PairMetric, text_metrics


def translation_task(
    *,
    tfds_name: str,
    vocab_path: str | None,
    vocab_size: int | None,
    source: str,
    target: str,
    metrics: Sequence[PairMetric] = ("exact_match",),
) -> Any:
    """Return a task whose `inputs` and `targets` are a text and its translation, followed by EOS.

    Texts longer than a row are cut.

    Args:
      tfds_name: TFDS name with configuration and version; examples have a text per language.
      vocab_path: Vocabulary of both languages; see `vocabulary`.
      vocab_size: See `vocabulary`.
      source: Feature name of the source language, such as `en`.
      target: Feature name of the target language.
      metrics: Metrics of decoded texts, whose references are not cut.

    Returns:
      A `seqio.Task`.

    Raises:
      ConfigError: No vocabulary is set, it does not exist, or it is too large.
      MissingExtraError: SeqIO is not installed.
    """
    seqio = import_seqio()
    tokens = vocabulary(vocab_path, vocab_size)
    name = tfds_name.partition(":")[0].replace("/", "_").replace("-", "_")
    return seqio.Task(
        f"{name}_{source}_to_{target}",
        source=seqio.TfdsDataSource(tfds_name),
        preprocessors=[
            functools.partial(_inputs_and_targets, source=source, target=target),
            functools.partial(seqio.preprocessors.tokenize, copy_pretokenized=True),
            seqio.preprocessors.append_eos_after_trim,
        ],
        postprocess_fn=_reference,
        metric_fns=[functools.partial(text_metrics, metrics=metrics)],
        output_features={
            feature: seqio.Feature(tokens, add_eos=True) for feature in ("inputs", "targets")
        },
    )


def _inputs_and_targets(dataset: Any, *, source: str, target: str) -> Any:
    autograph = import_tensorflow().autograph.experimental

    @autograph.do_not_convert
    def pair(example: Mapping[str, Any]) -> dict[str, Any]:
        return {"inputs": example[source], "targets": example[target]}

    return dataset.map(pair)


def _reference(decoded: str, *, example: Mapping[str, Any], is_target: bool) -> str:
    """Return the uncut text of a target, or the decoded text of a prediction."""
    return example["targets_pretokenized"].decode() if is_target else decoded
