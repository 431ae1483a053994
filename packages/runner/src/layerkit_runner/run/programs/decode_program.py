"""DecodeProgram: decodes one data set and writes a record of each example as JSON lines.

Each process feeds its own rows, gets the outputs of all rows and makes the same records. Process 0
writes them.

The text of a continuation is what follows the text of the prompt if all tokens are decoded
together. Decoding the new tokens alone loses text. SentencePiece omits the space before the first
word, and the bytes of a character may be spread over several tokens.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from etils import epath

from layerkit.base.base_model import WeightedScalar
from layerkit.config.nested_map import NestedMap
from layerkit_inputs.base.base_input import BaseInput
from layerkit_inputs.base.evaluation import ROW_MARKS, example_rows
from layerkit_inputs.base.tokenizer_interface import Tokenizer
from layerkit_runner.data.host_inputs import eval_batches, peek_eval_batch, report_skipped
from layerkit_runner.distributed.cluster import run_on_process_0
from layerkit_runner.errors import UsageError
from layerkit_runner.files.atomic_write import atomic_write
from layerkit_runner.observers import DECODE_PREFIX, Observer
from layerkit_runner.observers.metrics_log import encode
from layerkit_runner.run.programs.eval_program import BaseProgram
from layerkit_runner.step.metrics import ByExample, OverBatches, as_floats
from layerkit_runner.step.train_state import TrainState

_BATCH_INDEX = jax.ShapeDtypeStruct((), np.int32)


class _Processed:
    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []
        self._scalars = OverBatches()
        self._metrics: dict[str, Any] = {}

    def add(self, scalars: Any, records: Any, metrics: Any) -> None:
        self._scalars.add({name: WeightedScalar.of(*pair) for name, pair in scalars.items()})
        for key, value in records:
            plain = jax.tree.map(lambda x: x.tolist() if hasattr(x, "tolist") else x, value)
            fields = plain if isinstance(plain, Mapping) else {"value": plain}
            self.records.append({"key": key, **fields})
        for name, metric in metrics.items():
            known = self._metrics.get(name)
            self._metrics[name] = metric if known is None else known.merge(metric)

    def metrics(self) -> dict[str, float]:
        computed = {name: float(metric.compute()) for name, metric in self._metrics.items()}
        return self._scalars.means() | computed


class DecodeProgram(BaseProgram):
    """A program that decodes one data set of prompts; see `BaseProgram` for the arguments.

    Outputs are kept in `folder`; without one, they are returned only.
    """

    dataset: BaseInput

    @functools.cached_property
    def _step(self) -> Callable[..., Any]:
        return self.partitioner.decode_step_fn(self.task)

    def trace(self, abstract_state: TrainState) -> None:
        """Trace one step on the first batch; see `BaseProgram.trace`."""
        if type(self).run is not DecodeProgram.run:
            return
        try:
            batch = peek_eval_batch(self.dataset)
        except StopIteration:
            return
        abstract_batch = self.partitioner.abstract_batch(batch)
        jax.eval_shape(self._step, abstract_state, abstract_batch, _BATCH_INDEX)

    def output_path(self, step: int) -> epath.Path | None:
        """Return the path of the outputs of a step; None if there is no folder."""
        return None if self.folder is None else self.folder / self.name / f"step_{step:08d}.jsonl"

    def run(self, state: TrainState, step: int, observers: Observer) -> list[dict[str, Any]]:
        """Decode with the weights after `step` steps, and replace the outputs of that step.

        Returns:
          One record per example, with `example` (its provenance) if the data set numbers its
            examples. A model that continues prompts has `prompt` (the source, for a model with an
            encoder), `continuation`, `log_prob` (sum over the drawn tokens, in nats), `num_tokens`
            and, if the model ranks continuations, `score` and `candidates`, best first. Prompt and
            continuation are together the text of all ids; `prediction`, the text of the new ids
            alone, is added where a metric of the data set reads another text. Without a vocabulary,
            `prompt_ids` and `continuation_ids` replace the texts. All other outputs of the model
            follow by their names.
        """
        path = self.output_path(step)
        decoded, processed = self._decode(state, path)
        records = processed.records or decoded.records
        if path is not None and jax.process_index() == 0:
            path.unlink(missing_ok=True)  # a kill may leave other arrays beside it
            arrays = path.with_suffix(".npz")
            if (npz := decoded.npz()) is None:
                arrays.unlink(missing_ok=True)
            else:
                atomic_write(arrays, npz)
            atomic_write(path, "".join(encode(record) + "\n" for record in records))
        self._report_records(records, step, observers, processed.metrics())
        for record in records[:1]:
            observers.text(step, self.name, record_text(record) or encode(record))
        return records

    def _report_records(
        self,
        records: list[dict[str, Any]],
        step: int,
        observers: Observer,
        processed: dict[str, float],
    ) -> None:
        metrics = report_skipped(self.dataset, self.name, observers) | processed
        if self.dataset.has_prediction_metrics:
            if records and "continuation" not in records[0]:
                problem = "metrics over predicted texts need ids, lengths and log_probs of decode()"
                raise UsageError(problem, owner=self.name, value=list(records[0]))
            predictions = ByExample[str](self.name)
            # Targets are encoded alone, without the prompt.
            texts = [one.get("prediction", one["continuation"]) for one in records]
            predictions.add([one["example"] for one in records], texts)
            metrics |= run_on_process_0(
                lambda: as_floats(self.dataset.prediction_metrics(predictions.values))
            )
        self.metrics = metrics
        if metrics:
            observers.eval_metrics(step, DECODE_PREFIX + self.name, metrics)

    def _decode(
        self, state: TrainState, path: epath.Path | None
    ) -> tuple[DecodedRecords, _Processed]:
        npz_name = None if path is None else f"{path.stem}.npz"
        decoded = DecodedRecords(self.dataset, self.name, npz_name=npz_name)
        processed = _Processed()
        for index, batch in enumerate(eval_batches(self.dataset)):
            global_batch = self.partitioner.put_batch(batch)
            outputs = jax.device_get(self._step(state, global_batch, np.int32(index)))
            results = self.task.model.process_decode_out(self.dataset, outputs)
            if results is None:
                decoded.add(outputs, jax.tree.leaves(global_batch)[0].shape[0])
            else:
                processed.add(*results)
        return decoded, processed


LARGEST_LIST = 1024
"""Largest number of values of one example in a record; larger arrays go to the `.npz` file."""

_CONTINUATION = ("ids", "lengths", "log_probs", "prompt_lengths")
_OPTIONAL = ("scores", "candidates", "source")


class DecodedRecords:
    """The records of one decoding, collected batch by batch."""

    def __init__(self, dataset: BaseInput, name: str, *, npz_name: str | None) -> None:
        """Start without records."""
        self.records: list[dict[str, Any]] = []
        self._dataset = dataset
        self._name = name
        self._npz_name = npz_name
        self._large: dict[str, list[np.ndarray]] = {}

    def add(self, outputs: NestedMap, num_rows: int) -> None:
        """Add the outputs `[rows, …]` of a global batch, with the marks of `decode_step`."""
        # Other rows only fill up the batch.
        is_example = example_rows(outputs)
        if is_example is None and "prompt_lengths" in outputs:
            is_example = np.asarray(outputs.prompt_lengths) > 0
        rows = np.flatnonzero(np.ones(num_rows, bool) if is_example is None else is_example)
        records: list[dict[str, Any]] = [{} for _ in rows]
        if "provenance" in outputs:
            records = [{"example": int(outputs.provenance[row])} for row in rows]
        done = set(ROW_MARKS)
        if all(name in outputs for name in _CONTINUATION):
            texts = self._continued_prompts(outputs)
            records = [{**record, **texts[row]} for record, row in zip(records, rows, strict=True)]
            done |= {*_CONTINUATION, *_OPTIONAL}
        else:
            done.add("prompt_lengths")  # belongs to the batch
        others = {name: value for name, value in outputs.items() if name not in done}
        for path, leaf in jax.tree_util.tree_leaves_with_path(others):
            key = jax.tree_util.keystr(path, simple=True, separator=".")
            values = self._row_values(key, leaf, num_rows)[rows]
            for record, value in zip(records, values, strict=True):
                if self._npz_name is None or value.size <= LARGEST_LIST:
                    record[key] = value.tolist()
                    continue
                kept = self._large.setdefault(key, [])
                record[key] = {"npz": self._npz_name, "array": key, "row": len(kept)}
                kept.append(value)
        self.records += records

    def npz(self) -> bytes | None:
        """Return the content of the `.npz` file; None if no array is large."""
        if not self._large:
            return None
        content = io.BytesIO()
        np.savez(content, **{key: np.stack(values) for key, values in self._large.items()})  # type: ignore[arg-type]
        return content.getvalue()

    def _row_values(self, key: str, leaf: Any, num_rows: int) -> np.ndarray:
        array = np.asarray(leaf)
        if array.ndim == 0 or array.shape[0] != num_rows:
            owner = f"{self._name}: decode() of the model"
            expected = f"[{num_rows}, …], one entry for each row of the batch"
            raise UsageError(owner=owner, field=key, value=list(array.shape), expected=expected)
        if array.dtype.kind == "c":
            return np.stack([array.real, array.imag], axis=-1)
        # NumPy does not support bfloat16 and float8, and would write their bytes.
        return array if array.dtype.kind in "biuf" else array.astype(np.float32)

    def _continued_prompts(self, outputs: NestedMap) -> list[dict[str, Any]]:
        prompt_lengths = np.asarray(outputs.prompt_lengths)
        prompts: list[str] | None = None
        if "source" in outputs:
            source, key = outputs.source, "tgt"
            records = self._texts("prompt", source.ids, source.lengths, key="src")
        else:
            ids, key = np.asarray(outputs.ids), None
            records = self._texts("prompt", ids, prompt_lengths, key=None)
            if "prompt" in records[0]:
                wholes = self._texts("prompt", ids, outputs.lengths, key=None)
                # Not the last character of a prompt that ends inside of it.
                prompts = [
                    shared_beginning(record["prompt"], whole["prompt"])
                    for record, whole in zip(records, wholes, strict=True)
                ]
                records = [{"prompt": prompt} for prompt in prompts]
        best = self._continuations(outputs, prompt_lengths, prompts, key=key)
        records = [{**prompt, **fields} for prompt, fields in zip(records, best, strict=True)]
        if "candidates" in outputs:
            count = outputs.candidates.lengths.shape[1]
            flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), outputs.candidates)
            lengths = np.repeat(prompt_lengths, count)
            prompts = prompts and [prompt for prompt in prompts for _ in range(count)]
            candidates = self._continuations(flat, lengths, prompts, key=key)
            for row, record in enumerate(records):
                ranked = candidates[row * count : (row + 1) * count]
                # A search may find fewer than were requested; the others have no score.
                record["candidates"] = [one for one in ranked if one["score"] is not None]
        return records

    def _continuations(
        self,
        outputs: NestedMap,
        prompt_lengths: np.ndarray,
        prompts: list[str] | None,
        *,
        key: str | None,
    ) -> list[dict[str, Any]]:
        ids, lengths = np.asarray(outputs.ids), np.asarray(outputs.lengths)
        tails = [ids[row, prompt_lengths[row] : lengths[row]] for row in range(len(ids))]
        width = max((len(tail) for tail in tails), default=0)
        padded = np.stack([np.pad(tail, (0, width - len(tail))) for tail in tails])
        texts = self._texts("continuation", padded, lengths - prompt_lengths, key=key)
        if prompts is not None:
            wholes = self._texts("whole", ids, lengths, key=key)
            texts = [
                self._after(prompt, whole["whole"], text["continuation"])
                for prompt, whole, text in zip(prompts, wholes, texts, strict=True)
            ]
        records: list[dict[str, Any]] = [
            {
                **texts[row],
                "log_prob": float(np.sum(outputs.log_probs[row])),
                "num_tokens": len(tails[row]),
            }
            for row in range(len(ids))
        ]
        if "scores" in outputs:
            for record, score in zip(records, outputs.scores, strict=True):
                record["score"] = float(score) if np.isfinite(score) else None
        return records

    def _after(self, prompt: str, whole: str, alone: str) -> dict[str, str]:
        """Return the continuation, and the prediction if the data set compares another text."""
        continuation = continuation_text(prompt, whole, alone)
        if continuation == alone or not self._dataset.has_prediction_metrics:
            return {"continuation": continuation}
        return {"continuation": continuation, "prediction": alone}

    def _texts(
        self, name: str, ids: np.ndarray, lengths: np.ndarray, *, key: str | None
    ) -> list[dict[str, Any]]:
        try:
            texts = self._dataset.ids_to_strings(ids, lengths, key=key)
        except NotImplementedError:
            rows = zip(ids, lengths, strict=True)
            return [{f"{name}_ids": row[:length].tolist()} for row, length in rows]
        return [{name: text} for text in texts]


def record_text(record: Mapping[str, Any]) -> str | None:
    """Return a prompt and its continuation as one text; None for a record without texts."""
    if "prompt" not in record or "continuation" not in record:
        return None
    return f"{record['prompt']}⟫{record['continuation']}"


# Text of bytes that are not yet a whole character.
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


def continuation_text(prompt: str, whole: str, alone: str) -> str:
    """Return the text that follows a prompt.

    Args:
      prompt: Text of the prompt's ids.
      whole: Text of the ids of prompt and continuation.
      alone: Text of the continuation's ids. It is returned if `whole` has another beginning than
        `prompt`, or ends with it, as SeqIO's vocabularies stop at an end token in the prompt.
    """
    return (whole[len(prompt) :] if whole.startswith(prompt) else "") or alone


def shared_beginning(first: str, second: str) -> str:
    """Return the longest text with which two texts begin."""
    pairs = enumerate(zip(first, second, strict=False))
    return first[: next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))]


class TextStream:
    """The text of a continuation, in pieces that later tokens do not change.

    Attributes:
      ids: New token ids so far.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = ()) -> None:
        """Start after the prompt's ids."""
        self.ids: list[int] = []
        self._tokenizer = tokenizer
        self._prompt_ids = list(prompt_ids)
        self._prompt = tokenizer.decode(self._prompt_ids) if self._prompt_ids else ""
        # The next byte may make all bytes before it invalid, also after a special token.
        names = ("byte_ids", "special_tokens")
        self._open_ids = {i for name in names for i in getattr(tokenizer, name, ())}
        self._num_returned = 0

    def add(self, token_id: int) -> str:
        """Add a token and return the text that it completes; empty if it completes none."""
        self.ids.append(int(token_id))
        if token_id in self._open_ids:
            return ""
        text = self.text()
        return "" if text.endswith(_INCOMPLETE) else self._take(text)

    def rest(self) -> str:
        """Return the text of the last tokens, whose last character may be incomplete."""
        return self._take(self.text())

    def text(self) -> str:
        """Return the whole text so far."""
        whole = self._tokenizer.decode([*self._prompt_ids, *self.ids])
        return continuation_text(self._prompt, whole, self._tokenizer.decode(self.ids))

    def _take(self, text: str) -> str:
        piece = text[self._num_returned :]
        self._num_returned = len(text)
        return piece
