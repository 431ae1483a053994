"""TeacherRows: rows of another input with the arrays that were written for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from layerkit.errors import ConfigError
from layerkit_inputs import TeacherRows
from layerkit_inputs.mixing.teacher_rows import write_teacher_rows
from layerkit_inputs.testing import laws
from layerkit_inputs.text.local_text import LocalText

K = 3


@pytest.fixture
def source(tmp_path: Path) -> Any:
    (tmp_path / "text.txt").write_text("one two three\n" * 40)
    paths = [str(tmp_path / "text.txt")]
    return LocalText.HParams.config(name="train", paths=paths, seq_length=16)


def arrays_of(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Arrays that tell the number of their row."""
    ids = np.broadcast_to(rows[:, None, None], (len(rows), 16, K))
    return ids.astype(np.int32), -ids[..., :1].repeat(K + 1, -1).astype(np.float32)


def write(folder: Path, source: Any, **about: Any) -> None:
    reader = source.clone(batch_size=4).Instantiate()
    numbers = (batch.provenance for batch in reader.eval_batches())
    about = {"teacher": "digest", "temperature": 1.0, **about}
    write_teacher_rows(str(folder), reader, ((n, *arrays_of(n)) for n in numbers), **about)


def teacher_rows(folder: Path, source: Any, **fields: Any) -> TeacherRows:
    fields = {"name": "train", "batch_size": 4, "teacher": "digest", **fields}
    return TeacherRows.HParams.config(source=source, folder=str(folder), **fields).Instantiate()


def test_rows_have_their_own_arrays_in_any_order_and_after_a_restore(tmp_path: Path, source: Any):
    write(tmp_path, source)
    first = {int(n): row for n, row in _rows(source.clone(batch_size=1).Instantiate())}
    training = teacher_rows(tmp_path, source, is_training=True)
    state = None
    for _ in range(2 * len(first) // 4):
        batch = training.get_next()
        numbers = batch.teacher_ids[:, 0, 0]
        ids, log_probs = arrays_of(numbers)
        np.testing.assert_array_equal(batch.teacher_ids, ids)
        np.testing.assert_array_equal(batch.teacher_log_probs, log_probs)
        for number, row in zip(numbers.tolist(), batch.ids, strict=True):
            np.testing.assert_array_equal(row, first[number])
        state = state or training.get_state()
    resumed = teacher_rows(tmp_path, source, is_training=True)
    resumed.set_state(state or {})
    again = teacher_rows(tmp_path, source, is_training=True)
    again.get_next()
    np.testing.assert_array_equal(resumed.get_next().ids, again.get_next().ids)


def _rows(reader: Any) -> Any:
    for batch in reader.eval_batches():
        yield from zip(batch.provenance, batch.ids, strict=True)


@pytest.mark.parametrize(
    ("field", "fields", "changes"),
    [
        ("teacher", {"teacher": "other"}, {}),
        ("temperature", {"temperature": 2.0}, {}),
        ("rows", {}, {"seq_length": 8}),
    ],
)
def test_stale_files_raise(
    tmp_path: Path, source: Any, raises: Any, field: str, fields: Any, changes: Any
):
    write(tmp_path, source)
    reader = teacher_rows(tmp_path, source.clone(**changes), **fields)
    with raises(ConfigError, field=field):
        reader.get_next()


def test_unfinished_files_raise(tmp_path: Path, source: Any, raises: Any):
    write(tmp_path, source)
    (tmp_path / "train" / "about.json").unlink()
    with raises(ConfigError, field="teacher", value=None):
        teacher_rows(tmp_path, source).get_next()


@pytest.mark.parametrize("is_training", [True, False], ids=["training", "epoch"])
@pytest.mark.parametrize("law", laws.LAWS, ids=lambda law: law.__name__)
def test_teacher_rows_obey_the_laws_of_inputs(
    law: Any, is_training: bool, tmp_path: Path, source: Any, check_law: Any
):
    write(tmp_path, source)
    fields = {"name": "train", "batch_size": 4, "is_training": is_training, "source": source}
    check_law(law, lambda **more: TeacherRows(folder=str(tmp_path), **{**fields, **more}))
