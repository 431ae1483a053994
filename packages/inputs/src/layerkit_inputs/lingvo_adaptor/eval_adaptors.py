"""One epoch of a Lingvo input over several hosts, each row once, padded to whole batches.

Every host reads the whole stream, in one order, and keeps the rows that are its own: so all know
without a word to one another where the epoch ends. Rows are dealt out as everywhere: of each global
batch, host h has the block `[h * batch_size, (h + 1) * batch_size)`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from layerkit.nested_map import NestedMap
from layerkit_inputs.eval_padding import empty_batch, num_rows_of
from layerkit_inputs.lingvo_adaptor.adaptor import LingvoInputAdaptor, rows_of_params


class _OneEpochOfAllHosts(LingvoInputAdaptor):
    """Reads any rows of the stream, in rising order, and refuses what has no order or no end."""

    def __post_init__(self) -> None:
        self._restart_stream()
        super().__post_init__()
        if self.is_training or self.repeat:
            raise self._config_error(
                f"is_training={self.is_training}, repeat={self.repeat}; it reads one epoch. Use "
                "LingvoInputAdaptor to train, or to evaluate on a number of batches."
            )
        # Outside of training, Lingvo's bucketing drops the batches that stay short at the end.
        limits = "bucket_batch_limit" in self._params and self._params.bucket_batch_limit
        if limits and any(limit != 1 for limit in limits) and self._batches_by_tf_data():
            raise self._config_error(
                f"input.bucket_batch_limit={limits}; Lingvo drops the rows of a last, short batch. "
                "Set it to 1 for each bucket, and batch_size to the rows that are wanted here."
            )

    def _batches_by_tf_data(self) -> bool:
        return hasattr(self._params.cls, "ProcessDataset")

    def _set_file_random_seed(self) -> None:
        """All hosts read the same stream, so their seeds stay the same."""

    def _restart_stream(self) -> None:
        self._template: NestedMap | None = None
        self._current: NestedMap | None = None
        self._current_start = self._current_stop = 0
        self._rows_total: int | None = None

    def _reset(self) -> None:
        super()._reset()
        self._restart_stream()

    def _open(self) -> None:
        super()._open()
        if not self._reads_in_order and self.num_infeed_hosts > 1:
            self._stop_reading()
            raise self._config_error(
                "its Lingvo input reads records at random, so hosts would not share one epoch. Set "
                "cluster_do_eval=True, and repeat_count=1."
            )

    def _rows(self, start: int, stop: int) -> NestedMap:
        """Rows `[start, stop)` of the stream, as far as there are any; `start` only rises."""
        parts = []
        while True:
            if self._current is not None:
                first = max(start, self._current_start) - self._current_start
                last = min(stop, self._current_stop) - self._current_start
                if first < last:
                    parts.append(_slice(self._current, first, last))
            if self._current_stop >= stop or not self._read_more():
                break
        if self._template is None:
            raise self._config_error("there are no rows to read.")
        return _concatenate(parts) if parts else self._template.copy()

    def _read_more(self) -> bool:
        if self._rows_total is not None:
            return False
        try:
            batch = self._read_lingvo_batch()
        except StopIteration:
            self._rows_total = self._current_stop
            return False
        self._current = batch
        self._current_start = self._current_stop
        self._current_stop += num_rows_of(batch)
        if self._template is None:
            self._template = empty_batch(batch, 0)
        return True


class LingvoEvalAdaptor(_OneEpochOfAllHosts):
    """One epoch of a Lingvo input that ends, in batches of `batch_size` rows on each host.

    The generator must give the same rows in the same order on every host: set
    `cluster_do_eval=True`. Nothing is held but the generator's last batch; each host reads all of
    the data. With `num_batches`, the epoch is that many batches of the generator.
    """

    @classmethod
    def get_batch_size(cls, config: Any) -> int | None:
        """The config's own `batch_size`."""
        return config.batch_size

    def _takes_batch_size_from_params(self) -> bool:
        return False

    def _make_batch(self) -> NestedMap:
        global_start = self._num_made * self.global_batch_size
        start = global_start + self.infeed_host_index * self.local_batch_size
        rows = self._rows(start, start + self.local_batch_size)
        if self._rows_total is not None and self._rows_total <= global_start:
            raise StopIteration
        return self._number(rows, range(start, start + num_rows_of(rows)))


class LingvoLazyEvalAdaptor(_OneEpochOfAllHosts):
    """One epoch of `input.num_samples` rows, in whole batches of the Lingvo input.

    For a generator that begins again when its data end, or that knows only by the number of rows
    where to stop. Host h has every batch of the generator whose number is h modulo the hosts; the
    batch size is the generator's. Rows beyond `num_samples` are made padding. With `num_batches`,
    each host makes at most as many.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        samples = self._params.num_samples if "num_samples" in self._params else 0
        if not samples or samples < 1 or rows_of_params(self._params) is None:
            raise self._config_error(
                f"input.num_samples={samples}, input.batch_size={rows_of_params(self._params)}; "
                "expected both, at least 1."
            )

    @property
    def num_samples(self) -> int:
        """Rows of the epoch that are this host's."""
        total, size = self._params.num_samples, self.local_batch_size
        whole, rest = divmod(total, self.global_batch_size)
        return whole * size + min(max(rest - self.infeed_host_index * size, 0), size)

    def _refuse_endless_epoch(self) -> None:
        """It ends by the number of samples."""

    def _most_reads(self) -> int | None:
        return None

    def _make_batch(self) -> NestedMap:
        total = self._params.num_samples
        global_start = self._num_made * self.global_batch_size
        if global_start >= total or self._num_made == self.num_batches:
            raise StopIteration
        start = global_start + self.infeed_host_index * self.local_batch_size
        stop = min(start + self.local_batch_size, total)
        rows = self._rows(min(start, total), stop)
        if self._rows_total is not None and self._rows_total < total and stop > self._rows_total:
            raise self._config_error(
                f"input.num_samples={total}, but the Lingvo input ended after {self._rows_total} "
                "rows."
            )
        return self._number(rows, range(start, start + num_rows_of(rows)))


def _slice(batch: NestedMap, start: int, stop: int) -> NestedMap:
    return batch.transform(lambda array: array[start:stop])


def _concatenate(parts: list[NestedMap]) -> NestedMap:
    joined = NestedMap()
    for name, value in parts[0].items():
        values = [part[name] for part in parts]
        joined[name] = (
            _concatenate(values) if isinstance(value, NestedMap) else np.concatenate(values)
        )
    return joined
