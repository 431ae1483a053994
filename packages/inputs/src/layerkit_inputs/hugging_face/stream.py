"""HuggingFaceStream: language modelling over a Hugging Face data set read as it comes.

Nothing is tokenised ahead and nothing is kept but a window of examples, so a data set of any size
trains at once. It resumes exactly, which `datasets` by itself does only without shuffling: a
shuffle buffer's contents are not in its `state_dict`. Here the stream is read in windows of
`shuffle_window` examples; each window is permuted by Philox with the key [seed, epoch] and the
window's number as counter, and the state is the stream's where the window began, how many examples
of it were taken, and the tokens of rows not yet full. The order of files also differs by epoch.

While training, each host reads files of its own (`split_dataset_by_node`; where their number does
not divide by the hosts, every so many examples of all files), so a state fits only as many hosts.
In evaluation every host reads the whole split and keeps its own rows: all of them make the same
number of batches to the last example without asking one another, and the state fits any hosts.
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

from layerkit.nested_map import NestedMap
from layerkit_inputs.eval_padding import pad_rows
from layerkit_inputs.extras import require
from layerkit_inputs.features import Segment, segment_features
from layerkit_inputs.hugging_face.input import Packing, check_row_fields, too_long
from layerkit_inputs.hugging_face.text import Example, HuggingFaceText
from layerkit_inputs.state import Scope, why_data_differ
from layerkit_inputs.stream_packer import StreamPacker


@dataclasses.dataclass
class _Position:
    """Where the stream of examples stands."""

    epoch: int = 0
    window: int = 0
    """Number of the window in its epoch."""
    window_state: dict[str, Any] | None = None
    """The library's state where the window begins; None at the start of an epoch."""
    taken: int = 0
    """Examples of the window that are done with."""
    used: int = 0
    """Examples of the epoch that could be used."""


class HuggingFaceStream(HuggingFaceText):
    """Rows of text for language modelling, from a data set read as it comes.

    Batches are those of HuggingFaceInput, with the same fields and `packing`, but in `first_fit`
    only the last few rows wait for an example that fits. Resuming reads one window again.
    """

    seq_length: int = 1024
    """Positions of a row."""
    packing: Packing = "stream"
    """`stream` (cut anywhere), `first_fit` (whole examples) or `none` (an example a row)."""
    trim: bool = False
    """With `packing="none"`: of examples longer than a row, only the first `seq_length` predictions
    are read."""
    shuffle: bool | None = None
    """Shuffle files and windows, in each epoch anew. None: while training."""
    shuffle_window: int = 1024
    """Examples of a window, which are in memory."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_row_fields(self, packing=self.packing, trim=self.trim)
        self._check_at_least(1, "shuffle_window")
        self._seed = self.input_random_seed or 0
        if not 0 <= self._seed < 2**64:
            raise self._config_error(
                f"input_random_seed={self._seed}; expected 0 or more, below 2**64."
            )
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
        self._restart()

    @property
    def state_scope(self) -> Scope:  # type: ignore[override]
        """`host` while training, when each host reads files of its own; else `global`."""
        return "host" if self.is_training else "global"

    def _restart(self) -> None:
        self._position = _Position()
        self._rows: Iterator[list[Segment]] | None = None
        self._rows_done = 0
        if self._packer is not None:
            self._packer.clear()

    def _reset(self) -> None:
        self._restart()

    # Examples.

    def _stream(self) -> Any:
        """This host's share, as tables of examples."""
        if self._opened is None:
            stream = self._open_streamed()
            if self.is_training and self.num_infeed_hosts > 1:
                distributed = require("datasets.distributed", needed_by=type(self).__qualname__)
                stream = distributed.split_dataset_by_node(
                    stream, rank=self.infeed_host_index, world_size=self.num_infeed_hosts
                )
            self._opened = stream.with_format("arrow")
        return self._opened

    def _tables(self) -> Iterator[Any]:
        """The windows of an epoch from the position on, which moves with them."""
        stream, position = self._stream(), self._position
        shuffled_epoch = np.random.SeedSequence([self._seed, position.epoch]).generate_state(1)[0]
        # Any epoch but 0 shuffles the order of files, the same on every host.
        stream.set_epoch(1 + int(shuffled_epoch) if self.shuffle else 0)
        # The library writes into what it is given.
        stream.load_state_dict(copy.deepcopy(position.window_state))
        for table in self._guarded(stream.iter(self.shuffle_window)):
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
                share = f" in the share of host {self.infeed_host_index} of {self.num_infeed_hosts}"
                raise self._config_error(
                    f"{self._data_in_words()}: no examples that can be used"
                    f"{share if self.is_training and self.num_infeed_hosts > 1 else ''}."
                )
            if not self.endless:
                return
            self._position = _Position(epoch=self._position.epoch + 1)

    # Rows.

    def _framed(self, example: Example) -> Segment:
        end = [] if self._tokenizer.eos_id is None else [self._tokenizer.eos_id]
        tokens = np.concatenate([example.inputs, example.targets, np.array(end, np.int32)])
        return Segment(tokens, len(example.inputs), self._tokenizer.start_id)

    def _single_rows(self) -> Iterator[list[Segment]]:
        """An example a row."""
        for example in self._all_examples():
            segment = self._framed(example)
            size = len(segment.tokens)
            if size > self.seq_length and not self.trim:
                raise self._config_error(too_long(self._position.used - 1, size, self.seq_length))
            yield [segment._replace(tokens=segment.tokens[: self.seq_length])]

    def _packed_rows(self) -> Iterator[list[Segment]]:
        packer = self._packer_of_rows()
        yield from iter(packer.take_segments, None)
        for example in self._all_examples():
            segment = self._framed(example)
            inputs = None if self.inputs_field is None else example.inputs
            packer.add(segment.tokens[len(example.inputs) :], inputs)
            yield from iter(packer.take_segments, None)
        packer.finish()
        yield from iter(packer.take_segments, None)

    def _packer_of_rows(self) -> StreamPacker:
        if self._packer is None:
            self._packer = StreamPacker(
                mode="cut" if self.packing == "stream" else "first_fit",
                bos_id=self._tokenizer.start_id,
                **self._row_fields,
            )
        return self._packer

    def _next(self) -> NestedMap:
        if self._rows is None:
            self._rows = self._single_rows() if self.packing == "none" else self._packed_rows()
        if self.is_training:
            own = [next(self._rows) for _ in range(self.local_batch_size)]
            return segment_features(own, **self._row_fields)
        rows = [*itertools.islice(self._rows, self.global_batch_size)]
        if not rows:
            raise StopIteration
        begin = self.infeed_host_index * self.local_batch_size
        own = rows[begin : begin + self.local_batch_size]
        batch = segment_features(own, **self._row_fields)
        first = self._rows_done + begin
        batch.provenance = np.arange(first, first + len(own), dtype=np.int32)
        batch.eval_sample_weights = np.ones(len(own), np.float32)
        self._rows_done += self.global_batch_size
        return pad_rows(batch, self.local_batch_size - len(own))

    # States.

    @functools.cached_property
    def _identity(self) -> dict[str, Any]:
        """What decides which rows there are."""
        self._stream()
        names = [f"{Path(file).name} {_size_of(file)}" for file in self._files]
        order = {"seed": self._seed} if self.shuffle else {}
        return {
            **self._text_identity(),
            "files_crc32": zlib.crc32("\n".join(names).encode()),
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
        problem = why_data_differ(position.pop("data"), self._identity)
        if problem is not None:
            raise self._config_error(problem)
        self._restart()
        if self.packing != "none":
            self._packer_of_rows().set_state(position.pop("packer"))
        self._rows_done = position.pop("rows_done")
        self._position = _Position(**position)

    def _close(self) -> None:
        self._rows = self._opened = None


def _size_of(file: str) -> int | None:
    return Path(file).stat().st_size if Path(file).is_file() else None
