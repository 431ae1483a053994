"""GrainIterInput: rows of a `grain.IterDataset`, in its order.

Each host has its own pipeline, made by a function of the host index. The state is that of the Grain
iterator, usually some hundred bytes, and fits the same host of the same number of hosts.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np

from layerkit.config.checks import require
from layerkit.config.hparams import Conditions
from layerkit.config.nested_map import NestedMap
from layerkit_inputs.base.base_input import BaseInput
from layerkit_inputs.base.errors import BadRecordError, OnBadRecord, check_same_data, require_extra
from layerkit_inputs.base.evaluation import agreed_num_batches, pad_rows
from layerkit_inputs.grain.row_batches import stack_rows, to_arrays
from layerkit_inputs.grain.worker_transfer import RowList, RowsOfLists

_END = object()  # after the last element of an epoch


class GrainStream(BaseInput):
    """Base class of inputs that make a `grain.IterDataset` for each host and read it in its order.

    Hosts must have disjoint rows. `seed` is derived from `input_random_seed` and differs by epoch
    in training; evaluation always uses the seed of the first epoch. In training, a batch may hold
    rows of two epochs. Evaluation batches have `provenance` (int32 `[batch]`; row `k` of host `h`
    of `n` is `k * n + h`) and `eval_sample_weights` (float32 `[batch]`). Hosts may have different
    numbers of rows; `BaseInput.eval_batches` makes an evaluation end on all hosts together.

    An exception ends a Grain pipeline for good. So a pipeline that cannot read a record should
    return, not raise, a BadRecordError in place of the row. The input raises it, or skips the row.
    """

    used_only_if: ClassVar[Conditions] = {"worker_buffer_size": "num_workers"}

    num_workers: int = 0
    """Number of worker processes, each of which makes a part of the rows (Grain's `mp_prefetch`).
    0: the rows are made in this process. The order of rows depends on it, so a state fits only the
    same number."""
    worker_buffer_size: int = 16
    """Number of rows that a worker sends at once. Workers prefetch about one batch. The order of
    rows depends on it, as on `num_workers`."""
    on_bad_record: OnBadRecord = "refuse"
    """Policy for rows that cannot be read: `refuse` raises, `skip` counts them."""

    def __post_init__(self) -> None:
        """Check the fields and start before the first row."""
        super().__post_init__()
        self._seed = self.input_random_seed or 0
        self._check_at_least(0, "num_workers")
        self._check_at_least(1, "worker_buffer_size")
        self._epoch = 0
        self._rows_done = 0
        self._num_used = 0  # number of rows of the epoch that could be read
        self._batches_done = 0
        self._iterator: Any = None

    # Methods of subclasses; the first is required.

    def _make_dataset(self, *, host_index: int, num_hosts: int, seed: int) -> Any:
        """Return the data set of a host for one epoch."""
        raise NotImplementedError(f"{type(self).__qualname__} must define _make_dataset().")

    def _rows_of_hosts(self) -> list[int] | None:
        """Return the number of rows of each host in an epoch, or None if it is unknown."""
        return None

    # Implementation of BaseInput.

    def _next(self) -> NestedMap:
        rows: list[NestedMap] = []
        numbers: list[int] = []
        while len(rows) < self.local_batch_size:
            row = self._next_row()
            if row is None:
                if not self.endless:
                    break
                if not self._num_used:
                    host = f"host {self.infeed_host_index} of {self.num_infeed_hosts}"
                    raise self._config_error(f"{host} can read none of {self._rows_done} rows")
                self._begin_epoch(self._epoch + 1)
                continue
            self._num_used += 1
            numbers.append((self._rows_done - 1) * self.num_infeed_hosts + self.infeed_host_index)
            rows.append(row)
        if not rows and self._batches_done >= self._num_planned_batches:
            raise StopIteration
        self._batches_done += 1
        return self._batch(rows, numbers)

    def _batch(self, rows: list[NestedMap], numbers: list[int]) -> NestedMap:
        if rows:
            batch = stack_rows(rows, name_of=lambda at: f"{self._label}, row {numbers[at]}")
        else:  # other hosts have more rows; any row gives the shapes
            batch = stack_rows([self._any_row], name_of=str).transform(lambda array: array[:0])
        if not self.is_training:
            batch.provenance = np.array(numbers, np.int32)
            batch.eval_sample_weights = np.ones(len(rows), np.float32)
        return pad_rows(batch, self.local_batch_size - len(rows), copy=False)

    def _next_row(self) -> NestedMap | None:
        """Return the next readable row of the epoch, or None at its end."""
        while True:
            element = self._next_element()
            if element is _END:
                return None
            try:
                if isinstance(element, BadRecordError):
                    raise element
                return to_arrays(element)
            except BadRecordError as error:
                if error is not element:
                    error.owner = f"{self._label}, row {self._rows_done - 1}"
                if self.on_bad_record == "refuse":
                    raise
                where = f"host {self.infeed_host_index}, epoch {self._epoch}"
                self._bad.report(file=where, record=self._rows_done - 1, problem=str(error))

    def _next_element(self) -> Any:
        """Return the next element of the pipeline, or `_END`."""
        if self._iterator is None:
            self._iterate()
        try:
            element = next(self._iterator, _END)
        except Exception as error:
            # An error in a worker is that of a list of rows.
            later = " or later" if self.num_workers else ""
            where = f"{self._label}, row {self._rows_done}{later} of epoch {self._epoch}"
            if isinstance(error, RuntimeError) and "Worker process was terminated" in str(error):
                problem = "a worker process was terminated, for example for lack of memory"
                raise OSError(f"{where}: {problem} ({error}).") from None
            error.add_note(f"In {where}.")
            raise
        self._rows_done += element is not _END
        return element

    def _pipeline(self) -> Any:
        dataset = self._dataset_of_host(self.infeed_host_index, self.num_infeed_hosts)
        if self.num_workers:
            grain = require_extra("grain", needed_by=type(self).__qualname__)
            _mark_flags_parsed()
            dataset = dataset.batch(self.worker_buffer_size, batch_fn=RowList)
            lists_ahead = -(-self.local_batch_size // self.worker_buffer_size)
            options = grain.MultiprocessingOptions(self.num_workers, lists_ahead)
            dataset = dataset.mp_prefetch(options)
        return dataset

    def _dataset_of_host(self, host_index: int, num_hosts: int) -> Any:
        """Return the data set of a host for the epoch, or raise if it is no `grain.IterDataset`."""
        grain = require_extra("grain", needed_by=type(self).__qualname__)
        # Evaluation repeats the order of the first epoch. Grain requires 31 bits.
        epoch = self._epoch if self.is_training else 0
        seed = int(np.random.SeedSequence([self._seed, epoch]).generate_state(1)[0] >> 1)
        dataset = self._make_dataset(host_index=host_index, num_hosts=num_hosts, seed=seed)
        is_valid = isinstance(dataset, grain.IterDataset)
        expected = "a function that returns a grain.IterDataset; GrainMapInput reads a MapDataset"
        require(is_valid, self._label, "dataset", type(dataset).__qualname__, expected)
        return dataset

    @functools.cached_property
    def _num_planned_batches(self) -> int:
        """Number of batches of the host with most rows, or 0 if it is unknown."""
        counts = self._rows_of_hosts()
        return agreed_num_batches(counts, self.local_batch_size) if counts else 0

    @functools.cached_property
    def _any_row(self) -> NestedMap:
        """Row of any host, for the shapes on a host without rows."""
        with contextlib.closing(iter(self._dataset_of_host(0, 1))) as iterator:
            for element in iterator:
                if not isinstance(element, BadRecordError):
                    return to_arrays(element)
                if self.on_bad_record == "refuse":
                    raise element
        raise self._config_error("the data set has no rows")

    def _begin_epoch(self, epoch: int) -> None:
        self._close()
        self._epoch, self._rows_done, self._num_used = epoch, 0, 0

    def _reset(self) -> None:
        self._begin_epoch(0)
        self._batches_done = 0

    def _identity(self) -> dict[str, Any]:
        workers: dict[str, Any] = {"num_workers": self.num_workers}
        if self.num_workers:
            workers["worker_buffer_size"] = self.worker_buffer_size
        return {"seed": self._seed, **workers, **self._cached_fingerprint}

    def _reader_state(self) -> dict[str, Any]:
        iterator = None if self._iterator is None else self._iterator.get_state()
        return {
            "epoch": self._epoch,
            "rows_done": self._rows_done,
            "batches_done": self._batches_done,
            "iterator": _to_json(iterator),
            "data": self._identity(),
        }

    def _set_reader_state(self, position: dict[str, Any]) -> None:
        check_same_data(self._label, position["data"], self._identity())
        self._begin_epoch(position["epoch"])
        self._rows_done, self._batches_done = position["rows_done"], position["batches_done"]
        self._num_used = self._rows_done
        if position["iterator"] is not None:
            self._iterate()
            self._iterator.set_state(position["iterator"])

    def _iterate(self) -> None:
        iterator = iter(self._pipeline())
        self._iterator = RowsOfLists(iterator) if self.num_workers else iterator
        self._close_iterator = weakref.finalize(self, _close_on_another_thread, iterator)

    def _close(self) -> None:
        if self._iterator is not None:
            self._iterator = None
            self._close_iterator()


class GrainIterInput(GrainStream):
    """An input of rows of a `grain.IterDataset`, in its order.

    The function `dataset` is called in each epoch, with keyword arguments:

        def rows(*, host_index: int, num_hosts: int, seed: int) -> grain.IterDataset:
            mine = grain.MapDataset.source(names)[host_index::num_hosts]
            return mine.shuffle(seed=seed).map(parse).to_iter_dataset().filter(is_good)
    """

    dataset: Callable[..., Any] | None = None
    """Function that makes the data set of a host. Required."""

    def _make_dataset(self, *, host_index: int, num_hosts: int, seed: int) -> Any:
        make: Any = self.dataset
        return make and make(host_index=host_index, num_hosts=num_hosts, seed=seed)


def _close_on_another_thread(iterator: Any) -> None:
    """Close a Grain iterator, which joins its threads.

    The garbage collector may run on one of these threads, which cannot join itself.
    """
    if threading.current_thread() is threading.main_thread():
        iterator.close()
    else:
        threading.Thread(target=iterator.close, daemon=True).start()


def _mark_flags_parsed() -> None:
    """Mark absl flags as parsed, so that Grain can read its flags in any program."""
    from absl import flags  # a dependency of Grain

    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()


def _to_json(state: Any) -> Any:
    """Return a Grain state as JSON values, with NumPy scalars as Python numbers."""
    if isinstance(state, Mapping):
        return {key: _to_json(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return [_to_json(value) for value in state]
    return state.item() if isinstance(state, np.generic) else state
