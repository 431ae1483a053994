"""GrainIterInput: rows that a `grain.IterDataset` gives one after the other.

Every host has a pipeline of its own, made by a function that is told which host it is for. States
are those of Grain's iterators, some hundred bytes as a rule, and fit the same host of as many.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np

from layerkit.nested_map import NestedMap
from layerkit_inputs.bad_records import BadRecordError, BadRecords, OnBadRecord
from layerkit_inputs.base_input import BaseInput
from layerkit_inputs.eval_padding import agreed_num_batches, pad_rows
from layerkit_inputs.extras import require
from layerkit_inputs.grain_adaptor.row_batches import check_row, stack_rows
from layerkit_inputs.grain_adaptor.row_lists import RowList, RowsOfLists
from layerkit_inputs.state import why_data_differ


class GrainIterInput(BaseInput):
    """Rows of a `grain.IterDataset`, in its order.

    The function of `dataset` is called with keywords, again for each epoch:

        def rows(*, host_index: int, num_hosts: int, seed: int) -> grain.IterDataset:
            mine = grain.MapDataset.source(names)[host_index::num_hosts]
            return mine.shuffle(seed=seed).map(parse).to_iter_dataset().filter(is_good)

    Rows of different hosts must be different ones. `seed` follows from `input_random_seed` and is
    another one in each epoch; outside of training it stays that of the first. While training,
    batches run on from one epoch into the next. Outside of training batches have `provenance`
    (int32 `[batch]`, counted through the hosts: row `k` of host `h` of `n` is `k * n + h`) and
    `eval_sample_weights` (float32 `[batch]`). Hosts may have unlike numbers of rows; an evaluation
    makes them end together (`BaseInput.eval_batches`).

    An error in a pipeline ends it, as Grain cannot go on behind one. So a pipeline that meets a
    record it cannot read gives a BadRecordError (returned, not raised) in the place of a row; it is
    refused, or skipped and counted.
    """

    dataset: Any = None
    """The function that makes the rows of a host. Required."""
    num_workers: int = 0
    """Processes that make rows, each a part of them (Grain's `mp_prefetch`). 0: this one does. It
    decides the order of rows, so states fit the same number alone."""
    worker_buffer_size: int = 16
    """Rows that a worker sends at once; as many as make a batch wait to be taken. It decides the
    order of rows as `num_workers` does."""
    on_bad_record: OnBadRecord = "refuse"
    """`refuse` rows that cannot be read, or `skip` and count them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_at_least(0, "num_workers")
        self._check_at_least(1, "worker_buffer_size")
        self._seed = self.input_random_seed or 0
        if self._seed < 0:
            raise self._config_error(f"input_random_seed={self._seed}; expected 0 or more.")
        if self.on_bad_record not in ("refuse", "skip"):
            raise self._config_error(
                f"on_bad_record={self.on_bad_record!r}; expected one of ('refuse', 'skip')."
            )
        self._bad = BadRecords(self.on_bad_record)
        self._check_dataset()
        self._epoch = 0
        self._rows_done = 0
        self._batches_done = 0
        self._iterator: Any = None

    # What a subclass may replace.

    def _check_dataset(self) -> None:
        if not callable(self.dataset):
            raise self._config_error(
                f"dataset={self.dataset!r}; expected a function (host_index, num_hosts, seed) that "
                "makes a grain.IterDataset."
            )

    def _make_dataset(self, *, host_index: int, num_hosts: int, seed: int) -> Any:
        """The rows of a host in an epoch."""
        return self.dataset(host_index=host_index, num_hosts=num_hosts, seed=seed)

    def _rows_of_hosts(self) -> list[int] | None:
        """Rows of every host in an epoch, where that is known without reading them."""
        return None

    def _fingerprint(self) -> dict[str, Any]:
        """What decides which rows there are, as JSON values."""
        return {}

    # What BaseInput asks for.

    def _next(self) -> NestedMap:
        rows: list[NestedMap] = []
        numbers: list[int] = []
        while len(rows) < self.local_batch_size:
            row = self._next_row()
            if row is None:
                if not self.endless:
                    break
                self._begin_epoch(self._epoch + 1)
                continue
            numbers.append((self._rows_done - 1) * self.num_infeed_hosts + self.infeed_host_index)
            rows.append(row)
        if not rows and self._batches_done >= self._num_planned_batches:
            raise StopIteration
        self._batches_done += 1
        return self._batch(rows, numbers)

    def _batch(self, rows: list[NestedMap], numbers: list[int]) -> NestedMap:
        if rows:
            batch = stack_rows(rows, name_of=lambda at: f"{self._label}, row {numbers[at]}")
        else:  # other hosts have more: some row gives the shapes
            batch = stack_rows([self._any_row], name_of=str).transform(lambda array: array[:0])
        if not self.is_training:
            batch.provenance = np.array(numbers, np.int32)
            batch.eval_sample_weights = np.ones(len(rows), np.float32)
        return pad_rows(batch, self.local_batch_size - len(rows), copy=False)

    def _next_row(self) -> NestedMap | None:
        """The next row of the epoch that can be read; None at its end."""
        while True:
            try:
                element = self._next_element()
            except StopIteration:
                return None
            try:
                if isinstance(element, BadRecordError):
                    raise element
                return check_row(element, where=lambda: f"{self._label}, row {self._rows_done - 1}")
            except BadRecordError as error:
                if self.on_bad_record == "refuse":
                    raise
                where = f"host {self.infeed_host_index}, epoch {self._epoch}"
                self._bad.report(file=where, record=self._rows_done - 1, problem=str(error))

    def _next_element(self) -> Any:
        if self._iterator is None:
            self._iterate()
        try:
            element = next(self._iterator)
        except StopIteration:
            if self._rows_done == 0 and self.endless:
                raise self._config_error(
                    f"host {self.infeed_host_index} of {self.num_infeed_hosts} has no rows."
                ) from None
            raise
        except Exception as error:
            rows = f"row {self._rows_done}"
            if self.num_workers:  # what fails in a worker fails for the list that it makes
                rows += f" or one of the {self.worker_buffer_size - 1} after it"
            where = f"{self._label}, {rows} of epoch {self._epoch}"
            if isinstance(error, RuntimeError) and "Worker process was terminated" in str(error):
                raise OSError(
                    f"{where}: a worker process ended by itself, as one does that is out of memory "
                    f"({error})."
                ) from None
            error.add_note(f"In {where}.")
            raise
        self._rows_done += 1
        return element

    def _pipeline(self) -> Any:
        dataset = self._checked(
            self._make_dataset(
                host_index=self.infeed_host_index,
                num_hosts=self.num_infeed_hosts,
                seed=self._epoch_seed(),
            )
        )
        if self.num_workers:
            grain = require("grain", needed_by=type(self).__qualname__)
            _have_flags_parsed()
            dataset = dataset.batch(self.worker_buffer_size, batch_fn=RowList)
            lists_ahead = -(-self.local_batch_size // self.worker_buffer_size)
            options = grain.MultiprocessingOptions(self.num_workers, lists_ahead)
            dataset = dataset.mp_prefetch(options)
        return dataset

    def _checked(self, dataset: Any) -> Any:
        grain = require("grain", needed_by=type(self).__qualname__)
        if isinstance(dataset, grain.MapDataset):
            raise self._config_error(
                "dataset makes a grain.MapDataset; use GrainMapInput, whose states fit any number "
                "of hosts, or end it with to_iter_dataset()."
            )
        if not isinstance(dataset, grain.IterDataset):
            raise self._config_error(
                f"dataset makes {type(dataset).__qualname__}; expected a grain.IterDataset."
            )
        return dataset

    def _epoch_seed(self) -> int:
        """31 bits, as Grain's shuffles want them."""
        epoch = self._epoch if self.is_training else 0
        return int(np.random.SeedSequence([self._seed, epoch]).generate_state(1)[0] >> 1)

    @functools.cached_property
    def _num_planned_batches(self) -> int:
        """How many batches the fullest host makes, where that is known."""
        counts = self._rows_of_hosts()
        return agreed_num_batches(counts, self.local_batch_size) if counts else 0

    @functools.cached_property
    def _any_row(self) -> NestedMap:
        """A row of any host, for one that has none."""
        dataset = self._checked(
            self._make_dataset(host_index=0, num_hosts=1, seed=self._epoch_seed())
        )
        iterator = iter(dataset)
        try:
            return check_row(next(iterator), where=lambda: f"{self._label}, row 0")
        except StopIteration:
            raise self._config_error("there are no rows to read.") from None
        finally:
            iterator.close()

    @property
    def num_skipped(self) -> int:
        """Rows that this host could not read and left out so far."""
        return self._bad.num_skipped

    def _begin_epoch(self, epoch: int) -> None:
        self._close()
        self._epoch, self._rows_done = epoch, 0

    def _reset(self) -> None:
        self._begin_epoch(0)
        self._batches_done = 0

    def _identity(self) -> dict[str, Any]:
        workers: dict[str, Any] = {"num_workers": self.num_workers}
        if self.num_workers:
            workers["worker_buffer_size"] = self.worker_buffer_size
        return {"seed": self._seed, **workers, **self._fingerprint()}

    def _reader_state(self) -> dict[str, Any]:
        iterator = None if self._iterator is None else self._iterator.get_state()
        return {
            "epoch": self._epoch,
            "rows_done": self._rows_done,
            "batches_done": self._batches_done,
            "iterator": _as_json(iterator),
            "data": self._identity(),
        }

    def _set_reader_state(self, position: dict[str, Any]) -> None:
        if problem := why_data_differ(position["data"], self._identity()):
            raise self._config_error(problem)
        self._begin_epoch(position["epoch"])
        self._rows_done, self._batches_done = position["rows_done"], position["batches_done"]
        if position["iterator"] is not None:
            self._iterate()
            self._iterator.set_state(position["iterator"])

    def _iterate(self) -> None:
        from layerkit_inputs.grain_adaptor.untimed_rows import UntimedRows  # imports Grain

        iterator = iter(self._pipeline())
        self._iterator = RowsOfLists(iterator) if self.num_workers else UntimedRows(iterator)
        self._close_iterator = weakref.finalize(self, _close_on_another_thread, iterator)

    def _close(self) -> None:
        if self._iterator is not None:
            self._iterator = None
            self._close_iterator()


def _close_on_another_thread(iterator: Any) -> None:
    """Closes a Grain iterator, which waits for its threads to end.

    The garbage collector may call this on one of those, which cannot wait for itself.
    """
    if threading.current_thread() is threading.main_thread():
        iterator.close()
    else:
        threading.Thread(target=iterator.close, daemon=True).start()


def _have_flags_parsed() -> None:
    """Lets Grain read its absl flags in a program that has no absl flags; then they are unset."""
    from absl import flags  # comes with Grain

    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()


def _as_json(state: Any) -> Any:
    """A state of Grain's as JSON values, which it is but for numpy's numbers."""
    if isinstance(state, Mapping):
        for key in state:
            if not isinstance(key, str):
                raise BadRecordError(f"a Grain state has the key {key!r}, which JSON cannot keep.")
        return {key: _as_json(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return [_as_json(value) for value in state]
    return state.item() if isinstance(state, np.generic) else state
