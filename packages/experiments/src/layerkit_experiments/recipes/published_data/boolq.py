"""Yes-or-no questions about a passage (BoolQ; Clark et al., 2019, arXiv:1905.10044)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from layerkit.base.base_model import Metrics, WeightedScalar
from layerkit.config import Config
from layerkit.config.checks import require
from layerkit.config.nested_map import NestedMap
from layerkit.models import LanguageModel
from layerkit_experiments.recipes.published_data import seqio_tasks
from layerkit_experiments.recipes.published_data.corpora import (
    TEXT_READERS,
    Reader,
    answer_lengths,
    text_task,
)
from layerkit_inputs import SeqIOInput


class ChoiceLanguageModel(LanguageModel):
    """A language model that reports how often the answer is likelier than a wrong answer.

    A batch may have `wrong_targets` int32 `[batch, length]`, the wrong answer of each row. The
    logits of the two first tokens are compared, at the first position with a loss. The metric
    `choice_accuracy` is the share of rows in which that of the label is higher.
    """

    def compute_predictions(self, batch: NestedMap) -> NestedMap:
        """Return the outputs of the softmax and, if there are answers, `margin` `[batch]`."""
        expected = "False, since questions and answers are read from left to right"
        require(not self.is_prefix_lm, self, "is_prefix_lm", self.is_prefix_lm, expected)
        hidden = self.lm.hidden(
            batch.ids, segment_ids=batch.get("segment_ids"), segment_pos=batch.get("segment_pos")
        )
        predictions: NestedMap = self.lm.softmax(hidden, batch.labels, batch.weights)
        if "wrong_targets" in batch:
            first = jnp.argmax(batch.weights > 0, axis=1)[:, None]
            logits = self.lm.softmax.logits(jnp.take_along_axis(hidden, first[..., None], axis=1))
            right = jnp.take_along_axis(batch.labels, first, axis=1)
            answers = jnp.concatenate([right, batch.wrong_targets[:, :1]], axis=1)
            of_answers = jnp.take_along_axis(logits[:, 0], answers, axis=1)
            predictions.margin = of_answers[:, 0] - of_answers[:, 1]
        return predictions

    def compute_loss(self, predictions: NestedMap, batch: NestedMap) -> tuple[Metrics, NestedMap]:
        """Add `choice_accuracy` to the metrics of a LanguageModel, and `margin` to its outputs."""
        metrics, outputs = super().compute_loss(predictions, batch)
        if "margin" in predictions:
            is_row = jnp.any(batch.weights > 0, axis=1)
            rows = jnp.sum(is_row)
            right = jnp.sum((predictions.margin > 0) & is_row)
            metrics["choice_accuracy"] = WeightedScalar.of(right / jnp.maximum(rows, 1), rows)
            outputs.margin = predictions.margin
        return metrics, outputs


class AnswersInput(SeqIOInput):
    """Questions with their answers, and with `wrong_targets` int32 `[batch, length]`."""

    @classmethod
    def blank_batch(cls, config: Any, rows: int) -> NestedMap | None:
        """Return a batch of zeros, with which a plan needs neither TensorFlow nor data."""
        lengths = dict(config.task_feature_lengths)
        shape = (rows, lengths.pop("wrong_targets"))
        others = config.clone()
        others.task_feature_lengths = lengths
        batch = super().blank_batch(others, rows)
        if batch is not None:
            batch.wrong_targets = np.zeros(shape, np.int32)
        return batch


def report_choice_accuracy(model: Config) -> Config:
    """Return the config of a ChoiceLanguageModel with the fields of a LanguageModel."""
    fields = ("lm_tpl", "fprop_dtype", "decoder")
    return ChoiceLanguageModel.HParams.config(**{name: getattr(model, name) for name in fields})


def _questions(fields: Any, *, is_training: bool, **options: Any) -> Config:
    return AnswersInput.HParams.config(
        mixture_or_task=text_task(fields, seqio_tasks.yes_no_task),
        split_name="train" if is_training else fields.eval_split,
        task_feature_lengths={**answer_lengths(fields), "wrong_targets": 1},
        weights_on_targets_only=True,
        bos_id=fields.BOS_ID,
        use_packing=fields.PACKED_INPUT,
        tfds_data_dir=fields.TFDS_DATA_DIR,
        is_training=is_training,
        **options,
    )


def boolq_readers(_: Any) -> Mapping[str, Reader]:
    """Return the readers of questions of SuperGLUE, each in a row of its own.

    The experiment has TARGET_LENGTH and BOS_ID. The loss is on the answer alone. Token records have
    no answers and are not supported.
    """
    readers = {**TEXT_READERS, "seqio": _questions}
    del readers["grain"]
    return readers
