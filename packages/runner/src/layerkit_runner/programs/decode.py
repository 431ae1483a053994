"""DecodeProgram: continues the prompts of one data set and keeps them as JSON lines.

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

from layerkit.nested_map import NestedMap
from layerkit_inputs.base_input import BaseInput
from layerkit_runner.feeds.infeed import eval_batches
from layerkit_runner.feeds.skipped_records import report_skipped
from layerkit_runner.observers import DECODE_PREFIX, Observer
from layerkit_runner.partitioning import Partitioner
from layerkit_runner.processes.process_exchange import from_process_0
from layerkit_runner.programs.base import BaseProgram
from layerkit_runner.programs.made_from import (
    describe_settings,
    differences,
    read_made_from,
    weights_digest_fn,
    write_with_made_from,
)
from layerkit_runner.steps.by_example import ByExample, as_floats, check_has_provenance
from layerkit_runner.steps.train_state import TrainState
from layerkit_runner.task import SingleTask

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

    def output_path(self, step: int) -> epath.Path | None:
        """Where the outputs of the weights after `step` steps are kept."""
        return None if self.folder is None else self.folder / self.name / f"step_{step:08d}.jsonl"

    def run(self, state: TrainState, step: int, observers: Observer) -> list[dict[str, Any]]:
        """Decodes with the weights after `step` steps.

        A finished output is read, not made again, if it was made from the same weights, model
        settings and prompts.

        Returns:
          One record per prompt of the global batches: `example` (its provenance, where the data
          set gives one), `prompt` (the source, of a model that reads one), `continuation`,
          `log_prob` (sum over what was drawn, in nats), `num_tokens` and, where the model ranks
          continuations, `score`. Where several were asked for, `candidates` holds those that were
          found, best first, each with the last four.
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
        records = self._decode(state)
        if path is not None and jax.process_index() == 0:
            lines = "".join(json.dumps(record) + "\n" for record in records)
            write_with_made_from(path, lines, made_from)
        self._report(records, step, observers)
        for record in records[:1]:
            observers.text(step, self.name, f"{record['prompt']}⟫{record['continuation']}")
        return records

    def _report(self, records: list[dict[str, Any]], step: int, observers: Observer) -> None:
        metrics = report_skipped(self.dataset, self.name, observers)
        if self.dataset.has_prediction_metrics:
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

    def _decode(self, state: TrainState) -> list[dict[str, Any]]:
        records: list[dict[str, Any]] = []
        for index, batch in enumerate(eval_batches(self.dataset)):
            if self.dataset.has_prediction_metrics:
                check_has_provenance(batch, self.name)
            global_batch = self.partitioner.put_batch(batch)
            outputs = self._step(state, global_batch, np.int32(index))
            records.extend(self._records(jax.device_get(outputs)))
        return records

    def _records(self, outputs: NestedMap) -> list[dict[str, Any]]:
        prompt_lengths = np.asarray(outputs.prompt_lengths)
        if "source" in outputs:
            source, key = outputs.source, "tgt"
            prompts = self.dataset.ids_to_strings(source.ids, source.lengths, key="src")
        else:
            key = None
            prompts = self.dataset.ids_to_strings(np.asarray(outputs.ids), prompt_lengths)
        best = self._continuations(outputs, prompt_lengths, key=key)
        records = [{"prompt": prompt, **own} for prompt, own in zip(prompts, best, strict=True)]
        if "candidates" in outputs:
            count = outputs.candidates.lengths.shape[1]
            flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), outputs.candidates)
            found = self._continuations(flat, np.repeat(prompt_lengths, count), key=key)
            for row, record in enumerate(records):
                own = found[row * count : (row + 1) * count]
                # A search may find fewer than it was asked for; the others have no score.
                record["candidates"] = [one for one in own if one["score"] is not None]
        if "provenance" not in outputs:
            # Rows of padding fill up the last batch; they have no prompt.
            return [record for record, n in zip(records, prompt_lengths, strict=True) if n > 0]
        numbered = zip(np.asarray(outputs.provenance).tolist(), records, strict=True)
        return [{"example": number, **record} for number, record in numbered if number >= 0]

    def _continuations(
        self, outputs: NestedMap, prompt_lengths: np.ndarray, *, key: str | None
    ) -> list[dict[str, Any]]:
        """What each row says after its prompt.

        Args:
          outputs: `ids` and `log_probs` `[rows, length]`, `lengths` and, where there are any,
            `scores` `[rows]`.
          prompt_lengths: int32 `[rows]`.
          key: Which vocabulary; see `BaseInput.ids_to_strings`.
        """
        ids, lengths = np.asarray(outputs.ids), np.asarray(outputs.lengths)
        tails = [ids[row, prompt_lengths[row] : lengths[row]] for row in range(len(ids))]
        width = max((len(tail) for tail in tails), default=0)
        padded = np.stack([np.pad(tail, (0, width - len(tail))) for tail in tails])
        texts = self.dataset.ids_to_strings(padded, lengths - prompt_lengths, key=key)
        records: list[dict[str, Any]] = [
            {
                "continuation": texts[row],
                "log_prob": float(np.sum(outputs.log_probs[row])),
                "num_tokens": len(tails[row]),
            }
            for row in range(len(ids))
        ]
        if "scores" in outputs:
            for record, score in zip(records, outputs.scores, strict=True):
                # JSON has no infinity.
                record["score"] = float(score) if np.isfinite(score) else None
        return records


def _is_kept(path: epath.Path, made_from: dict[str, Any], observers: Observer) -> bool:
    """Whether finished outputs stand for these; process 0 looks and tells the others."""
    is_kept = False
    if jax.process_index() == 0 and path.exists():
        before = read_made_from(path)
        differing = differences(before, made_from)
        is_kept = not differing
        if is_kept:
            observers.message(f"{path} is already there")
        else:
            how = f"made with different {', '.join(differing)}" if before else "of unknown origin"
            observers.message(f"{path} is there but {how}; decoding again")
    return bool(multihost_utils.broadcast_one_to_all(np.int32(is_kept)))
