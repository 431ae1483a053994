"""A contest with the batches of a plain Lingvo generator, as NumPy arrays."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from input_rivals.contest import BATCH_SIZE, LENGTH, SHUFFLED, Batch, Contest, token_rows
from layerkit_inputs.lingvo import LingvoInputAdaptor, prepare

tensorflow = prepare()


def _rows(path: str = "") -> Any:
    """Return shuffled batches of rows from a file of fixed-length records."""
    records = tensorflow.data.FixedLengthRecordDataset(path, 4 * (LENGTH + 1))
    records = records.repeat().shuffle(SHUFFLED).batch(BATCH_SIZE, drop_remainder=True)

    def parse(record: Any) -> dict[str, Any]:
        row = tensorflow.io.decode_raw(record, tensorflow.int32)
        ones = tensorflow.ones([BATCH_SIZE, LENGTH])
        return {"ids": row[:, :-1], "labels": row[:, 1:], "weights": ones, "paddings": 1 - ones}

    return records.map(parse)


def generator(folder: Path) -> Contest:
    """Compare a tf.data input generator."""
    from lingvo.core.base_input_generator import DefineTFDataInput

    path = folder / "rows.bin"
    path.write_bytes(token_rows().astype("<i4").tobytes())
    params = DefineTFDataInput("TokenRows", _rows).Params()
    params.args.path = str(path)
    params.batch_size = BATCH_SIZE

    def bare() -> Iterator[Batch]:
        lingvo_input = params.Copy().Instantiate()
        while True:
            batch = lingvo_input.GetPreprocessedInputBatch()
            yield {name: np.asarray(value) for name, value in batch.items()}

    config = LingvoInputAdaptor.HParams.config(input=params, is_training=True)
    names = ("ids", "labels", "weights", "paddings")
    return Contest(
        config.Instantiate, bare, least_batches=64, renamed={name: name for name in names}
    )
