"""DecodeProgram: continues the prompts of one data set and keeps them as JSON lines."""

from __future__ import annotations

import json
from typing import Any

import jax
import numpy as np
from etils import epath

from layerkit.nested_map import NestedMap
from layerkit_inputs.base_input import BaseInput
from layerkit_runner.observers import Observer
from layerkit_runner.partitioning import Partitioner
from layerkit_runner.task import SingleTask
from layerkit_runner.train_state import TrainState
from layerkit_runner.whole_files import write_whole


class DecodeProgram:
    """Decodes one data set.

    Args:
      task: The task, bound to the partitioner.
      partitioner: Started.
      dataset: Prompts.
      name: What the data set is called in outputs.
      folder: Where outputs go; None keeps them in memory only.
    """

    def __init__(
        self,
        task: SingleTask,
        partitioner: Partitioner,
        dataset: BaseInput,
        name: str,
        folder: epath.Path | None,
    ):
        self._partitioner = partitioner
        self._step = partitioner.decode_step_fn(task)
        self._folder = folder
        self.dataset = dataset
        self.name = name

    def output_path(self, step: int) -> epath.Path | None:
        """Where the outputs of the weights after `step` steps are kept."""
        return None if self._folder is None else self._folder / self.name / f"step_{step:08d}.jsonl"

    def run(self, state: TrainState, step: int, observers: Observer) -> list[dict[str, Any]]:
        """Decodes with the weights after `step` steps; a finished output is read, not made again.

        Returns:
          One record per prompt: `prompt`, `continuation`, `log_prob` (sum over what was drawn, in
          nats) and `num_tokens`.
        """
        path = self.output_path(step)
        if path is not None and path.exists():
            observers.message(f"{path} is already there")
            return [json.loads(line) for line in path.read_text().splitlines()]
        records: list[dict[str, Any]] = []
        for batch in self.dataset.eval_batches():
            outputs = jax.device_get(self._step(state, self._partitioner.put_batch(batch)))
            records.extend(self._records(batch, outputs))
        if path is not None and jax.process_index() == 0:
            write_whole(path, "".join(json.dumps(record) + "\n" for record in records))
        for record in records[:1]:
            observers.text(step, self.name, record["prompt"] + record["continuation"])
        return records

    def _records(self, batch: NestedMap, outputs: NestedMap) -> list[dict[str, Any]]:
        ids, lengths = np.asarray(outputs.ids), np.asarray(outputs.lengths)
        prompt_lengths = np.asarray(batch.prompt_lengths)
        # Rows of padding fill up the last batch; they have no prompt.
        rows = [row for row in range(len(prompt_lengths)) if prompt_lengths[row] > 0]
        prompts = self.dataset.ids_to_strings(ids, prompt_lengths)
        tails = [ids[row, prompt_lengths[row] : lengths[row]] for row in range(len(ids))]
        width = max((len(tail) for tail in tails), default=0)
        padded = np.stack([np.pad(tail, (0, width - len(tail))) for tail in tails])
        continuations = self.dataset.ids_to_strings(padded, lengths - prompt_lengths)
        return [
            {
                "prompt": prompts[row],
                "continuation": continuations[row],
                "log_prob": float(np.sum(outputs.log_probs[row])),
                "num_tokens": int(lengths[row] - prompt_lengths[row]),
            }
            for row in rows
        ]
