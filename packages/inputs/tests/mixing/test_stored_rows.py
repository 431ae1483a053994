"""StoredRows: rows of another input with the arrays that were written for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from layerkit_inputs import StoredRows
from layerkit_inputs.base.errors import MissingFileError
from layerkit_inputs.testing import laws
from layerkit_inputs.text.local_text import LocalText

K = 3


@pytest.fixture
def source(tmp_path: Path) -> Any:
    (tmp_path / "text.txt").write_text("one two three\n" * 40)
    paths = [str(tmp_path / "text.txt")]
    return LocalText.HParams.config(name="train", paths=paths, seq_length=16)


def arrays_of(rows: np.ndarray) -> dict[str, np.ndarray]:
    """Arrays that tell the number of their row."""
    ids = np.broadcast_to(rows[:, None, None], (len(rows), 16, K)).astype(np.int32)
    log_probs = -ids[..., :1].repeat(K + 1, -1).astype(np.float32)
    return {"teacher_ids": ids, "teacher_log_probs": log_probs}


def write(folder: Path, source: Any, **fields: Any) -> None:
    stored_rows(folder, source, **fields).write(lambda batch: arrays_of(batch.provenance))


def stored_rows(folder: Path, source: Any, **fields: Any) -> StoredRows:
    fields = {"name": "train", "batch_size": 4, "about": {"teacher": "digest"}, **fields}
    return StoredRows.HParams.config(source=source, folder=str(folder), **fields).Instantiate()


def test_rows_have_their_own_arrays_in_any_order_and_after_a_restore(tmp_path: Path, source: Any):
    write(tmp_path, source)
    first = {int(n): row for n, row in _rows(source.clone(batch_size=1).Instantiate())}
    training = stored_rows(tmp_path, source, is_training=True)
    state = None
    for _ in range(2 * len(first) // 4):
        batch = training.get_next()
        numbers = batch.teacher_ids[:, 0, 0]
        for name, array in arrays_of(numbers).items():
            np.testing.assert_array_equal(batch[name], array)
        for number, row in zip(numbers.tolist(), batch.ids, strict=True):
            np.testing.assert_array_equal(row, first[number])
        state = state or training.get_state()
    resumed = stored_rows(tmp_path, source, is_training=True)
    resumed.set_state(state or {})
    again = stored_rows(tmp_path, source, is_training=True)
    again.get_next()
    np.testing.assert_array_equal(resumed.get_next().ids, again.get_next().ids)


def _rows(reader: Any) -> Any:
    for batch in reader.eval_batches():
        yield from zip(batch.provenance, batch.ids, strict=True)


@pytest.mark.parametrize(
    ("fields", "changes"),
    [({"about": {"teacher": "other"}}, {}), ({}, {"seq_length": 8}), ({"name": "heldout"}, {})],
    ids=["teacher", "rows", "data set"],
)
def test_missing_or_stale_files_raise(
    tmp_path: Path, source: Any, raises: Any, fields: Any, changes: Any
):
    write(tmp_path, source)
    changed = source.clone(**{"name": fields.get("name", "train"), **changes})
    with raises(MissingFileError, field="file"):
        stored_rows(tmp_path, changed, **fields).get_next()


def test_unfinished_files_raise(tmp_path: Path, source: Any, raises: Any):
    reader = stored_rows(tmp_path, source)

    def stop(batch: Any) -> Any:
        if batch.provenance[0] > 0:
            raise KeyboardInterrupt
        return arrays_of(batch.provenance)

    with pytest.raises(KeyboardInterrupt):
        reader.write(stop)
    with raises(MissingFileError, field="file"):
        reader.get_next()


@pytest.mark.parametrize("is_training", [True, False], ids=["training", "epoch"])
@pytest.mark.parametrize("law", laws.LAWS, ids=lambda law: law.__name__)
def test_stored_rows_obey_the_laws_of_inputs(
    law: Any, is_training: bool, tmp_path: Path, source: Any, check_law: Any
):
    write(tmp_path, source)
    fields = {"name": "train", "batch_size": 4, "is_training": is_training, "source": source}
    fields["about"] = {"teacher": "digest"}
    check_law(law, lambda **more: StoredRows(folder=str(tmp_path), **{**fields, **more}))
