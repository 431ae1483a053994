"""HuggingFaceStream: language modeling over a streamed Hugging Face data set.

The input tokenizes as it reads and keeps one window of examples in memory, so training on a data
set of any size starts at once. It resumes exactly; `datasets` does so only without shuffling, since
its `state_dict` lacks the shuffle buffer. The stream is read in windows of `shuffle_window`
examples. Each window is permuted by Philox with the key [seed, epoch] and the number of the window
as counter. The state holds the state of the stream at the start of the window, the number of
examples taken from it, and the tokens of incomplete rows. The order of files differs by epoch.

In training, each host reads its own files (`split_dataset_by_node`), or every n-th example of all
files if the number of files is not a multiple of the number of hosts. So a state fits only the same
number of hosts. In evaluation, each host reads the whole split and keeps its own rows, so all hosts
make the same number of batches without communication, and a state fits any number of hosts.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from layerkit.config.nested_map import NestedMap
from layerkit_inputs.base.base_input import Scope
from layerkit_inputs.base.errors import check_same_data, require_extra
from layerkit_inputs.base.evaluation import pad_rows
from layerkit_inputs.hugging_face.text_base import Example, HuggingFaceRows
from layerkit_inputs.packing.model_features import Segment, segment_features
from layerkit_inputs.packing.stream_packer import StreamPacker

_IDENTIFYING_BYTES = 1 << 16
"""Number of bytes of the first file that a state identifies."""


@dataclasses.dataclass
class _Position:
    """A position in the stream of examples."""

    epoch: int = 0
    window: int = 0
    """Zero-based number of the window in its epoch."""
    window_state: dict[str, Any] | None = None
    """State of the `datasets` stream at the start of the window; None at the start of an epoch."""
    taken: int = 0
    """Number of examples read from the window."""
    used: int = 0
    """Number of usable examples of the epoch so far."""


class HuggingFaceStream(HuggingFaceRows):
    """An input of rows of text for language modeling, from a streamed data set.

    Batches and `packing` are those of HuggingFaceInput, except that `first_fit` keeps only the last
    few rows open. Resuming reads one window again.
    """

    shuffle: bool | None = None
    """True to shuffle files and windows in each epoch. None: True in training."""
    shuffle_window: int = 1024
    """Number of examples of a window, which are kept in memory."""

    def __post_init__(self) -> None:
        """Check the fields and start before the first example."""
        super().__post_init__()
        self._check_at_least(1, "shuffle_window")
        self._seed = self.input_random_seed or 0
        if self.shuffle is None:
            self.shuffle = self.is_training
        has_inputs = self.inputs_field is not None
        self._row_fields: dict[str, Any] = {
            "length": self.seq_length,
            "pad_id": self._tokenizer.pad_id,
            "has_inputs": has_inputs,
            "weights_on_targets_only": has_inputs,
        }
        self._packer: StreamPacker | None = None
        self._opened: Any = None
        self._reset()

    @property
    def state_scope(self) -> Scope:  # type: ignore[override]
        """`host` in training, when each host reads its own files, else `global`."""
        return "host" if self.is_training else "global"

    def _reset(self) -> None:
        self._position = _Position()
        self._rows: Iterator[list[Segment]] | None = None
        self._error: Exception | None = None
        self._rows_done = 0
        if self._packer is not None:
            self._packer.clear()

    # Examples.

    def _stream(self) -> Any:
        """Return the examples of this host as a stream of tables."""
        if self._opened is None:
            stream = self._open_streamed()
            if self.is_training and self.num_infeed_hosts > 1:
                distributed = require_extra(
                    "datasets.distributed", needed_by=type(self).__qualname__
                )
                stream = distributed.split_dataset_by_node(
                    stream, rank=self.infeed_host_index, world_size=self.num_infeed_hosts
                )
            self._opened = stream.with_format("arrow")
        return self._opened

    def _tables(self) -> Iterator[Any]:
        """Yield the windows of the epoch from the position, which advances with them."""
        stream, position = self._stream(), self._position
        shuffled_epoch = np.random.SeedSequence([self._seed, position.epoch]).generate_state(1)[0]
        # Epochs above 0 shuffle the order of files, equally on every host.
        stream.set_epoch(1 + int(shuffled_epoch) if self.shuffle else 0)
        # The library modifies the dictionary.
        stream.load_state_dict(copy.deepcopy(position.window_state))
        with self._naming_unreadable_files():
            for table in stream.iter(self.shuffle_window):
                after = stream.state_dict()
                yield table
                position.window_state, position.taken = after, 0
                position.window += 1

    def _order(self, num_rows: int) -> np.ndarray:
        if not self.shuffle:
            return np.arange(num_rows)
        key = np.array([self._seed, self._position.epoch], np.uint64)
        counter = np.array([0, 0, 0, self._position.window], np.uint64)
        return np.random.Generator(np.random.Philox(key=key, counter=counter)).permutation(num_rows)

    def _epoch_examples(self) -> Iterator[Example]:
        position = self._position
        for table in self._tables():
            order = self._order(table.num_rows)[position.taken :]
            for row, example in self._examples(table, order.tolist()):
                position.taken += 1
                if isinstance(example, str):
                    self._report(position.window * self.shuffle_window + row, example)
                    continue
                position.used += 1
                yield example

    def _all_examples(self) -> Iterator[Example]:
        while True:
            yield from self._epoch_examples()
            if not self._position.used:
                raise self._config_error(f"no usable examples in {self._describe_files()}")
            if not self.endless:
                return
            self._position = _Position(epoch=self._position.epoch + 1)

    # Rows.

    def _single_rows(self) -> Iterator[list[Segment]]:
        """Yield rows of one example."""
        for example in self._all_examples():
            segment = Segment.of(*self._framed(example), first_id=None)
            if len(segment.tokens) > self.seq_length and not self.trim:
                raise self._too_long(self._position.used - 1, len(segment.tokens))
            yield [segment._replace(tokens=segment.tokens[: self.seq_length])]

    def _packed_rows(self) -> Iterator[list[Segment]]:
        packer = self._packer_of_rows()
        yield from iter(packer.take_segments, None)
        for example in self._all_examples():
            inputs, targets = self._framed(example)
            packer.add(targets, None if self.inputs_field is None else inputs)
            yield from iter(packer.take_segments, None)
        packer.finish()
        yield from iter(packer.take_segments, None)

    def _packer_of_rows(self) -> StreamPacker:
        if self._packer is None:
            self._packer = StreamPacker(
                mode="cut" if self.packing == "stream" else "first_fit",
                bos_id=None,
                **self._row_fields,
            )
        return self._packer

    def _next(self) -> NestedMap:
        if self._error is not None:
            raise self._error
        if self._rows is None:
            self._rows = self._single_rows() if self.packing == "none" else self._packed_rows()
        num_rows = self.local_batch_size if self.is_training else self.global_batch_size
        try:
            rows = [*itertools.islice(self._rows, num_rows)]
        except Exception as error:
            self._error = error  # which has ended the generator
            raise
        if self.is_training:
            return segment_features(rows, **self._row_fields)
        if not rows:
            raise StopIteration
        begin = self.infeed_host_index * self.local_batch_size
        local = rows[begin : begin + self.local_batch_size]
        batch = segment_features(local, **self._row_fields)
        first = self._rows_done + begin
        batch.provenance = np.arange(first, first + len(local), dtype=np.int32)
        batch.eval_sample_weights = np.ones(len(local), np.float32)
        self._rows_done += self.global_batch_size
        return pad_rows(batch, self.local_batch_size - len(local))

    def _num_documents(self) -> None:
        self._stream()

    # States.

    @functools.cached_property
    def _identity(self) -> dict[str, Any]:
        """Values that determine the rows; a state fits only equal ones."""
        self._stream()
        files, checksum = [Path(file) for file in self._files], 0
        names = [f"{file.name} {file.stat().st_size if file.is_file() else None}" for file in files]
        if files and files[0].is_file():  # data that are made anew may have the same sizes
            with files[0].open("rb") as opened:
                checksum = zlib.crc32(opened.read(_IDENTIFYING_BYTES))
        order = {"seed": self._seed} if self.shuffle else {}
        return {
            **self._text_identity(),
            "files_crc32": zlib.crc32("\n".join(names).encode(), checksum),
            "seq_length": self.seq_length,
            "packing": self.packing,
            "trim": self.trim,
            "shuffle_window": self.shuffle_window,
            **order,
        }

    def _reader_state(self) -> dict[str, Any]:
        packed = {} if self.packing == "none" else {"packer": self._packer_of_rows().state()}
        return {
            **dataclasses.asdict(self._position),
            "rows_done": self._rows_done,
            "data": self._identity,
            **packed,
        }

    def _set_reader_state(self, position: dict[str, Any]) -> None:
        check_same_data(self._label, position.pop("data"), self._identity)
        self._reset()
        if self.packing != "none":
            self._packer_of_rows().set_state(position.pop("packer"))
        self._rows_done = position.pop("rows_done")
        self._position = _Position(**position)

    def _close(self) -> None:
        self._rows = self._opened = self._error = None
