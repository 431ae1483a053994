"""DecodeProgram: decodes one data set and keeps a record of each example as JSON lines.

With several processes each feeds its own rows, gets the outputs of all rows and makes the same
records. Process 0 writes them, decides for all whether finished ones are read instead, and makes
the metrics that the data set defines over its predictions.
"""

from __future__ import annotations

import json
from typing import Any

import jax
import numpy as np
from etils import epath
from jax.experimental import multihost_utils

from layerkit_inputs.base_input import BaseInput
from layerkit_runner.data.infeed import eval_batches, peek_eval_batch
from layerkit_runner.data.skipped_records import report_skipped
from layerkit_runner.distributed.process_exchange import from_process_0
from layerkit_runner.errors import UsageError
from layerkit_runner.observers import DECODE_PREFIX, Observer
from layerkit_runner.observers.metrics_log import encode
from layerkit_runner.partitioning import Partitioner
from layerkit_runner.trainer.base import BaseProgram
from layerkit_runner.trainer.decode_records import DecodedRecords, sample_text
from layerkit_runner.trainer.provenance import (
    describe_settings,
    differences,
    npz_beside,
    read_made_from,
    weights_digest_fn,
    write_with_made_from,
)
from layerkit_runner.training.by_example import ByExample, as_floats, check_has_provenance
from layerkit_runner.training.task import SingleTask
from layerkit_runner.training.train_state import TrainState

_BATCH_INDEX = jax.ShapeDtypeStruct((), np.int32)
# Counted up when records change, so that those of an older form are made again.
_RECORD_FORMAT = 2


class DecodeProgram(BaseProgram):
    """Decodes one data set.

    Args:
      task: The task, bound to the partitioner.
      partitioner: Started.
      dataset: Prompts.
      name: What the decoding is called in outputs.
      folder: Where outputs go, in sight of every process; None keeps them in memory only.
      interval_steps: See `BaseProgram`.
    """

    dataset: BaseInput

    def __init__(
        self,
        task: SingleTask,
        partitioner: Partitioner,
        dataset: BaseInput,
        name: str,
        folder: epath.Path | None = None,
        *,
        interval_steps: int | None = None,
    ) -> None:
        super().__init__(task, partitioner, dataset, name, folder, interval_steps=interval_steps)
        self._weights_digest = weights_digest_fn(task, partitioner)
        self._step = partitioner.decode_step_fn(task)

    def trace(self, abstract_state: TrainState) -> None:
        """Trace one step on the first batch; see `BaseProgram.trace`."""
        if type(self).run is not DecodeProgram.run:
            return
        try:
            batch = peek_eval_batch(self.dataset)
        except StopIteration:
            return
        if self.dataset.has_prediction_metrics:
            check_has_provenance(batch, self.name)
        abstract_batch = self.partitioner.abstract_batch(batch)
        jax.eval_shape(self._step, abstract_state, abstract_batch, _BATCH_INDEX)

    def output_path(self, step: int) -> epath.Path | None:
        """Where the outputs of the weights after `step` steps are kept."""
        return None if self.folder is None else self.folder / self.name / f"step_{step:08d}.jsonl"

    def run(self, state: TrainState, step: int, observers: Observer) -> list[dict[str, Any]]:
        """Decodes with the weights after `step` steps.

        A finished output is read, not made again, if it was made from the same weights, model
        settings and prompts.

        Returns:
          One record per example of the global batches, with `example` (its provenance) where the
          data set gives one. Of a model that continues prompts it has `prompt` (the source, of a
          model that reads one), `continuation`, `log_prob` (sum over what was drawn, in nats),
          `num_tokens` and, where the model ranks continuations, `score`. Where several were asked
          for, `candidates` holds those that were found, best first, each with the last four. A data
          set without a vocabulary has `prompt_ids` and `continuation_ids` instead of the texts. All
          other outputs of the model are in the record by their names; see `DecodedRecords`.

        Raises:
          UsageError: the data set has metrics over texts, and the records hold none; or an output
            does not have one entry for each row.
        """
        path = self.output_path(step)
        made_from: dict[str, Any] = {}
        if path is not None:
            settings = describe_settings(self.task, self.dataset)
            weights = self._weights_digest(state)
            made_from = {"weights": weights, **settings, "record format": _RECORD_FORMAT}
            if _is_kept(path, made_from, observers):
                records = [json.loads(line) for line in path.read_text().splitlines()]
                self._report(records, step, observers)
                return records
        decoded = self._decode(state, path, observers)
        records = decoded.records
        if path is not None and jax.process_index() == 0:
            lines = "".join(encode(record) + "\n" for record in records)
            write_with_made_from(path, lines, made_from, npz=decoded.npz())
        self._report(records, step, observers)
        for record in records[:1]:
            observers.text(step, self.name, sample_text(record) or encode(record))
        return records

    def _report(self, records: list[dict[str, Any]], step: int, observers: Observer) -> None:
        metrics = report_skipped(self.dataset, self.name, observers)
        if self.dataset.has_prediction_metrics:
            if records and "continuation" not in records[0]:
                raise UsageError(
                    f"{self.name}: the data set has metrics over predicted texts, but the records"
                    f" hold {', '.join(records[0])}. Expected a continuation. Let decode() of the"
                    " model return ids, lengths and log_probs, or decode data without such metrics."
                )
            predictions = ByExample[str](self.name)
            predictions.add(
                [record["example"] for record in records],
                [record["continuation"] for record in records],
            )
            metrics |= from_process_0(
                lambda: as_floats(self.dataset.prediction_metrics(predictions.values))
            )
        self.metrics = metrics
        if metrics:
            observers.eval_metrics(step, DECODE_PREFIX + self.name, metrics)

    def _decode(
        self, state: TrainState, path: epath.Path | None, observers: Observer
    ) -> DecodedRecords:
        npz_name = None if path is None else npz_beside(path).name
        decoded = DecodedRecords(self.dataset, self.name, npz_name=npz_name)
        for index, batch in enumerate(eval_batches(self.dataset)):
            self.report_casts(batch, observers)
            if self.dataset.has_prediction_metrics:
                check_has_provenance(batch, self.name)
            global_batch = self.partitioner.put_batch(batch)
            outputs = self._step(state, global_batch, np.int32(index))
            num_rows = jax.tree.leaves(global_batch)[0].shape[0]
            decoded.add(jax.device_get(outputs), num_rows)
        return decoded


def _is_kept(path: epath.Path, made_from: dict[str, Any], observers: Observer) -> bool:
    """Whether finished outputs stand for these; process 0 looks and tells the others."""
    is_kept = False
    if jax.process_index() == 0 and path.exists():
        before = read_made_from(path)
        differing = differences(before, made_from)
        is_kept = not differing
        if is_kept:
            observers.message(
                f"{path} is already there. Its weights, fields and data set are the same; code is"
                " not compared. Delete this file to decode again."
            )
        else:
            how = f"made with different {', '.join(differing)}" if before else "of unknown origin"
            observers.message(f"{path} is there but {how}; decoding again")
    return bool(multihost_utils.broadcast_one_to_all(np.int32(is_kept)))
