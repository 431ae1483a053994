"""Records of decoded batches: the outputs of each example as JSON values.

A model may return any arrays `[batch, …]` from `decode`. Those of a continuation (`ids`, `lengths`,
`log_probs` and `prompt_lengths`) become texts where the data set has a vocabulary. All others are
kept by their names: numbers and lists in the record, large arrays in an `.npz` file beside it.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from layerkit.nested_map import NestedMap
from layerkit_inputs.base_input import BaseInput
from layerkit_inputs.eval_padding import example_rows
from layerkit_runner.errors import UsageError

LARGEST_LIST = 1024
"""Most numbers of one example that a record holds itself; larger arrays go to the `.npz` file."""

_CONTINUATION = ("ids", "lengths", "log_probs", "prompt_lengths")
_READ_WITH_IT = ("scores", "candidates", "source")
_ROW_MARKS = ("provenance", "eval_sample_weights")


class DecodedRecords:
    """Collects the records of one decoding, batch by batch.

    Args:
      dataset: The data set, whose vocabulary turns ids into texts.
      name: Name of the decoding, for error messages.
      npz_name: Name of the file for large arrays; None keeps all values in the records.

    Attributes:
      records: One record per example, without rows of padding.
    """

    def __init__(self, dataset: BaseInput, name: str, *, npz_name: str | None) -> None:
        self.records: list[dict[str, Any]] = []
        self._dataset = dataset
        self._name = name
        self._npz_name = npz_name
        self._large: dict[str, list[np.ndarray]] = {}

    def add(self, outputs: NestedMap, num_rows: int) -> None:
        """Add the outputs of a global batch.

        Args:
          outputs: NumPy arrays `[rows, …]`, with the marks of rows that `decode_step` keeps.
          num_rows: Rows of the global batch.

        Raises:
          UsageError: an output does not have one entry for each row.
        """
        rows = _kept_rows(outputs, num_rows)
        records: list[dict[str, Any]] = [{} for _ in rows]
        if "provenance" in outputs:
            records = [{"example": int(outputs.provenance[row])} for row in rows]
        done = set(_ROW_MARKS)
        if all(name in outputs for name in _CONTINUATION):
            texts = self._continued_prompts(outputs)
            records = [{**record, **texts[row]} for record, row in zip(records, rows, strict=True)]
            done |= {*_CONTINUATION, *_READ_WITH_IT}
        else:
            done.add("prompt_lengths")  # of the batch, and no output of the model
        others = {name: value for name, value in outputs.items() if name not in done}
        for path, leaf in jax.tree_util.tree_leaves_with_path(others):
            key = jax.tree_util.keystr(path, simple=True, separator=".")
            self._add_values(records, key, self._of_rows(key, leaf, num_rows)[rows])
        self.records += records

    def npz(self) -> bytes | None:
        """Return the content of the `.npz` file; None if no array is large."""
        if not self._large:
            return None
        content = io.BytesIO()
        np.savez(content, **{key: np.stack(values) for key, values in self._large.items()})  # type: ignore[arg-type]
        return content.getvalue()

    def _of_rows(self, key: str, leaf: Any, num_rows: int) -> np.ndarray:
        array = np.asarray(leaf)
        if array.ndim == 0 or array.shape[0] != num_rows:
            raise UsageError(
                f"{self._name}: decode() of the model returned {key!r} of shape"
                f" {list(array.shape)}. Expected one entry for each of the {num_rows} rows of the"
                f" batch, [{num_rows}, …]. Return arrays whose first axis is the batch's."
            )
        if array.dtype.kind == "c":
            return np.stack([array.real, array.imag], axis=-1)
        # NumPy itself knows neither bfloat16 nor float8, and would write their bytes.
        return array if array.dtype.kind in "biuf" else array.astype(np.float32)

    def _add_values(
        self, records: list[dict[str, Any]], key: str, values: Sequence[np.ndarray]
    ) -> None:
        for record, value in zip(records, values, strict=True):
            if self._npz_name is None or value.size <= LARGEST_LIST:
                record[key] = value.tolist()
                continue
            kept = self._large.setdefault(key, [])
            record[key] = {"npz": self._npz_name, "array": key, "row": len(kept)}
            kept.append(value)

    def _continued_prompts(self, outputs: NestedMap) -> list[dict[str, Any]]:
        prompt_lengths = np.asarray(outputs.prompt_lengths)
        if "source" in outputs:
            source, key = outputs.source, "tgt"
            prompts = self._texts("prompt", source.ids, source.lengths, key="src")
        else:
            key = None
            prompts = self._texts("prompt", np.asarray(outputs.ids), prompt_lengths, key=None)
        best = self._continuations(outputs, prompt_lengths, key=key)
        records = [{**prompt, **own} for prompt, own in zip(prompts, best, strict=True)]
        if "candidates" in outputs:
            count = outputs.candidates.lengths.shape[1]
            flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), outputs.candidates)
            found = self._continuations(flat, np.repeat(prompt_lengths, count), key=key)
            for row, record in enumerate(records):
                own = found[row * count : (row + 1) * count]
                # A search may find fewer than it was asked for; the others have no score.
                record["candidates"] = [one for one in own if one["score"] is not None]
        return records

    def _continuations(
        self, outputs: NestedMap, prompt_lengths: np.ndarray, *, key: str | None
    ) -> list[dict[str, Any]]:
        """Return what each row says after its prompt.

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
        texts = self._texts("continuation", padded, lengths - prompt_lengths, key=key)
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
                # JSON has no infinity.
                record["score"] = float(score) if np.isfinite(score) else None
        return records

    def _texts(
        self, name: str, ids: np.ndarray, lengths: np.ndarray, *, key: str | None
    ) -> list[dict[str, Any]]:
        """Return `{name: text}` of each row, or `{name}_ids` where the data set has no texts."""
        try:
            texts = self._dataset.ids_to_strings(ids, lengths, key=key)
        except NotImplementedError:
            rows = zip(ids, lengths, strict=True)
            return [{f"{name}_ids": row[:length].tolist()} for row, length in rows]
        return [{name: text} for text in texts]


def sample_text(record: dict[str, Any]) -> str | None:
    """Return a prompt and its continuation as one text; None for a record without texts."""
    if "prompt" not in record or "continuation" not in record:
        return None
    return f"{record['prompt']}⟫{record['continuation']}"


def _kept_rows(outputs: NestedMap, num_rows: int) -> np.ndarray:
    """Return the indices of the rows that are examples and do not only fill up the batch."""
    is_example = example_rows(outputs)
    if is_example is None and "prompt_lengths" in outputs:
        is_example = np.asarray(outputs.prompt_lengths) > 0
    if is_example is None:
        is_example = np.ones(num_rows, bool)
    return np.flatnonzero(is_example)
