"""Adaptors that read one epoch of a Lingvo input on several hosts, padded to whole batches.

Each host reads the whole stream in one order and keeps its own rows, so all hosts know the end of
the epoch without communication. Host h has rows `[h * batch_size, (h + 1) * batch_size)` of each
global batch.
"""

from __future__ import annotations

from layerkit.config.checks import require
from layerkit.config.nested_map import NestedMap
from layerkit_inputs.base.evaluation import concatenate_rows, empty_batch, num_rows_of
from layerkit_inputs.lingvo import tf_data
from layerkit_inputs.lingvo.adaptor import LingvoInputAdaptor, get_param


class _OneEpochOfAllHosts(LingvoInputAdaptor):
    """Base of adaptors that read rows of a finite stream with a fixed order."""

    def __post_init__(self) -> None:
        self._restart_stream()
        super().__post_init__()
        # In evaluation, Lingvo's bucketing drops incomplete batches at the end.
        limits = get_param(self._params, "bucket_batch_limit") or [1]
        if hasattr(self._params.cls, "ProcessDataset"):
            expected = "1 for each bucket, since Lingvo drops the rows of an incomplete batch"
            require(max(limits) == 1, self._label, "input.bucket_batch_limit", limits, expected)

    def _set_file_random_seed(self) -> None:
        """Keep the seed, since all hosts read the same stream."""

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
        is_ordered = self.cluster_do_eval or tf_data.is_tf_data(self.input_inst)
        expected = "True, since hosts share an epoch, and native inputs read in random order"
        is_valid = is_ordered or self.num_infeed_hosts == 1
        require(is_valid, self._label, "cluster_do_eval", self.cluster_do_eval, expected)

    def _rows(self, start: int, stop: int) -> NestedMap:
        """Return the existing rows in `[start, stop)` of the stream; `start` must not decrease."""
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
            raise self._config_error("the Lingvo input has no rows")
        return concatenate_rows(parts) if parts else self._template.copy()

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
    """An input of one epoch of a finite Lingvo input, in batches of `batch_size` rows per host.

    The generator must give the same rows in the same order on every host, so set
    `cluster_do_eval=True`. Each host reads all data and keeps one batch of the generator in memory.
    With `num_batches`, the epoch is that many batches of the generator.
    """

    batch_size_is_lingvos = False

    def _make_batch(self) -> NestedMap:
        global_start = self._num_made * self.global_batch_size
        start = global_start + self.infeed_host_index * self.local_batch_size
        rows = self._rows(start, start + self.local_batch_size)
        if self._rows_total is not None and self._rows_total <= global_start:
            raise StopIteration
        return self._number(rows, range(start, start + num_rows_of(rows)))


class LingvoLazyEvalAdaptor(_OneEpochOfAllHosts):
    """An input of one epoch of `input.num_samples` rows, in whole batches of the Lingvo input.

    It is for a generator that repeats its data. Host h of n has batches h, h + n, and so on, with
    the batch size of the generator. Rows beyond `num_samples` become padding. With `num_batches`,
    each host makes at most that many batches.
    """

    def __post_init__(self) -> None:
        """Check the number of samples."""
        super().__post_init__()
        samples = get_param(self._params, "num_samples")
        require(samples, self._label, "input.num_samples", samples, "a positive integer")

    @property
    def num_samples(self) -> int:
        """Number of rows of the epoch on this host."""
        total, size = self._params.num_samples, self.local_batch_size
        whole, rest = divmod(total, self.global_batch_size)
        return whole * size + min(max(rest - self.infeed_host_index * size, 0), size)

    @property
    def _may_be_endless(self) -> bool:
        return True  # `num_samples` ends the epoch

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
        return self._number(rows, range(start, start + num_rows_of(rows)))


def _slice(batch: NestedMap, start: int, stop: int) -> NestedMap:
    return batch.transform(lambda array: array[start:stop])
