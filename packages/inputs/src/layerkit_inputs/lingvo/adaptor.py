"""LingvoInputAdaptor: batches of a Lingvo input generator, from its params.

Lingvo reads, tokenizes, buckets and packs. The adaptor adds a reproducible order, a seed per host,
StopIteration at the end, full batches, weights and numbers of rows, and states. The fields are
those of Praxis.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import logging
import re
import warnings
import weakref
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import numpy as np

from layerkit.config.checks import require
from layerkit.config.nested_map import NestedMap
from layerkit_inputs.base.base_input import BaseInput
from layerkit_inputs.base.errors import BadRecordError
from layerkit_inputs.base.evaluation import num_rows_of, pad_rows
from layerkit_inputs.lingvo import tf_data
from layerkit_inputs.lingvo.preflight import NativeOpsError, prepare

_LOG = logging.getLogger("layerkit.inputs")


@runtime_checkable
class LingvoParams(Protocol):
    """Params that build a Lingvo input generator, which are Lingvo's `InstantiableParams`."""

    def Copy(self) -> Any:  # noqa: N802 - the names of Lingvo
        """Return params with the same values."""

    def Get(self, name: str) -> Any:  # noqa: N802
        """Return the value of a param."""

    def Instantiate(self) -> Any:  # noqa: N802
        """Return the generator."""


def get_param(params: Any, name: str) -> Any:
    """Return the value of a Lingvo param, or None if the params do not have it."""
    return params.Get(name) if name in params else None


def find_batch_size(params: Any) -> int | None:
    """Return the batch size in Lingvo params, or None if they have none."""
    if params is None:
        return None
    limits = get_param(params, "bucket_batch_limit")
    return max(limits) if limits else get_param(params, "batch_size") or None


class LingvoInputAdaptor(BaseInput):
    """An input of a Lingvo input generator, with the batch size of the generator.

    A batch holds the fields of the generator as NumPy arrays, without strings, and
    `eval_sample_weights` (float32 `[batch]`; 0 for padding of an incomplete last batch). Evaluation
    batches also have `provenance` (int32 `[batch]`, from 0; -1 for padding). Arrays without padding
    are read-only, since they share memory with TensorFlow.

    The generator divides the data between hosts, by Lingvo's infeed context and the seed of files.
    Many generators ignore the infeed context; evaluate these with LingvoEvalAdaptor, which divides
    the rows itself.
    """

    input: LingvoParams | None = None
    """Params of a Lingvo input generator, which are copied. Required."""
    num_batches: int | None = None
    """Number of batches of the generator after which the data end. None: the generator's own
    end."""
    allow_fixed_file_random_seed: bool = False
    """True to allow an `input.file_random_seed` other than 0, to which each host adds its index."""
    cluster_do_eval: bool = False
    """True to read one epoch in order in evaluation, as Lingvo's `cluster.do_eval` does."""
    on_inexact_resume: Literal["refuse", "new_order"] = "refuse"
    """Policy for a stream that is not the same when it is read again: `refuse` raises when a state
    is restored, `new_order` resumes with other batches, in which records may repeat."""

    batch_size_is_lingvos: ClassVar[bool] = True
    """Whether batches have the rows of those of the generator, and `batch_size` must be unset."""

    def __post_init__(self) -> None:
        """Check the fields and read the batch size from the params."""
        self._tf = prepare()
        expected = "params of a Lingvo input generator, such as MyInputGenerator.Params()"
        require(self.input is not None, self._label, "input", None, expected)
        self._check_at_least(1, "num_batches")
        params: Any = self.input
        self._params = params.Copy()
        self._set_file_random_seed()
        self._cluster = self._make_cluster()
        self._lingvo_input: Any = None
        self._read: Any = None
        self._is_endless = self._must_drain = False
        self._restart_counts()
        if self.batch_size_is_lingvos:
            expected = "None, since the Lingvo input has the batch size"
            require(self.batch_size is None, self._label, "batch_size", self.batch_size, expected)
            self.batch_size = find_batch_size(self._params) or self._rows_of_first_batch()
        super().__post_init__()

    @classmethod
    def get_batch_size(cls, config: Any) -> int | None:
        """Return the batch size per host, or None if it is known only from a batch."""
        return find_batch_size(config.input) if cls.batch_size_is_lingvos else config.batch_size

    @property
    def input_inst(self) -> Any:
        """Lingvo input generator, which is made at the first access."""
        if self._lingvo_input is None:
            with self._scope(), tf_data.tensorflow_seed(self._order_seed()):
                self._lingvo_input = self._params.Instantiate()
            if tf_data.is_tf_data(self._lingvo_input):
                weakref.finalize(self, tf_data.stop, self._lingvo_input.datasource).atexit = False
        return self._lingvo_input

    def _set_file_random_seed(self) -> None:
        seed = get_param(self._params, "file_random_seed")
        if not seed:
            return
        expected = "0, or allow_fixed_file_random_seed=True, with which each host adds its index"
        is_allowed = self.allow_fixed_file_random_seed
        require(is_allowed, self._label, "input.file_random_seed", seed, expected)
        self._params.file_random_seed = seed + self.infeed_host_index

    def _make_cluster(self) -> Any:
        """Return a Lingvo cluster, from which generators read the properties of the job."""
        cluster = copy.deepcopy(importlib.import_module("lingvo.core.cluster_factory").Current())
        cluster.params.xla_device = "tpu"  # fixed shapes, as for any accelerator
        cluster.params.enable_asserts = False
        cluster.params.do_eval = self.cluster_do_eval and not self.is_training
        if cluster.params.do_eval:
            # do_eval implies this, but some generators read the param and not the property.
            cluster.params.require_sequential_input_order = True
        return cluster

    @contextlib.contextmanager
    def _scope(self) -> Iterator[None]:
        """Enter the Lingvo cluster and infeed context of this input."""
        infeed = importlib.import_module("lingvo.core.cluster").InfeedContextScope
        with infeed(self.infeed_host_index, self.num_infeed_hosts), self._cluster:
            yield

    def _order_seed(self) -> int:
        """Return the seed of unseeded tf.data shuffles, which differs by host only in training."""
        seed = (self.input_random_seed or 0) * 1_000_003
        return (seed + (self.infeed_host_index if self.is_training else 0)) % (1 << 31)

    def _rows_of_first_batch(self) -> int:
        try:
            rows = num_rows_of(self._read_lingvo_batch())
        except StopIteration:
            raise self._config_error("the Lingvo input has no rows") from None
        self._reset()
        return rows

    # Reading.

    def _open(self) -> None:
        """Make the function that reads batches, unless there is one."""
        if self._read is not None:
            return
        generator = self.input_inst
        with warnings.catch_warnings(), self._scope(), tf_data.tensorflow_seed(self._order_seed()):
            # Generators make summaries, which are not used.
            warnings.filterwarnings("ignore", message=".*support for TF1 summary ops")
            read = generator.GetPreprocessedInputBatch
            try:
                if tf_data.is_tf_data(generator):
                    dataset = tf_data.start_over(self._tf, generator.datasource)
                    self._is_endless = (
                        int(dataset.cardinality()) == self._tf.data.INFINITE_CARDINALITY
                    )
                else:
                    # Traced only once, since each trace of a native op restarts the data.
                    read = self._tf.function(read, autograph=False).get_concrete_function()
                    repeats = get_param(self._params, "repeat_count") or 0
                    self._is_endless, self._must_drain = repeats < 0, repeats > 0
            except Exception as error:
                # TensorFlow wraps the errors of functions that it traces.
                _, name, problem = str(error).rpartition(f"{NativeOpsError.__name__}: ")
                if name:
                    raise NativeOpsError(problem.strip()) from error
                raise
        self._read = read

    @property
    def _may_be_endless(self) -> bool:
        return self.endless or self.num_batches is not None

    def _read_lingvo_batch(self) -> NestedMap:
        """Return the next batch of the generator as arrays `[rows, ...]`, without strings."""
        if self._num_read == self._most_reads():
            raise StopIteration
        self._open()
        try:
            with self._scope():
                batch = self._read()
            self._num_read += 1
        except self._tf.errors.OutOfRangeError:
            raise StopIteration from None
        except self._tf.errors.OpError as error:
            # Without the names of the graph.
            problem = re.sub(r"\[\[.*|\[Op:.*|\{\{[^}]*\}\}", "", error.message, flags=re.DOTALL)
            raise BadRecordError(
                f"{self._params.cls.__qualname__} failed at its batch {self._num_read}: "
                f"{' '.join(problem.split())}"
            ) from error
        return self._to_arrays(batch)

    def _to_arrays(self, batch: Any) -> NestedMap:
        arrays = NestedMap()
        for name, value in batch.items():
            if isinstance(value, dict):
                arrays[name] = self._to_arrays(value)
            elif getattr(value, "dtype", None) is not self._tf.string:
                # A read-only view of the tensor, which TensorFlow may return again.
                array = np.asarray(value)
                if array.dtype.kind not in "OSU":
                    arrays[name] = array
        return arrays

    def _most_reads(self) -> int | None:
        return self.num_batches

    def _restart_counts(self) -> None:
        self._num_read = 0
        self._num_made = 0
        self._rows_made = 0
        self._checksum = 0

    def _next(self) -> NestedMap:
        self._open()
        has_end = self._may_be_endless or not self._is_endless
        expected = "True, or num_batches or eval_loop_num_batches, since the data have no end"
        require(has_end, self._label, "cluster_do_eval", self.cluster_do_eval, expected)
        batch = self._make_batch()
        self._num_made += 1
        self._checksum = _add_to_checksum(batch, self._checksum)
        return batch

    def _make_batch(self) -> NestedMap:
        return self._complete(self._read_lingvo_batch())

    def _complete(self, batch: NestedMap) -> NestedMap:
        """Add weights and numbers of rows, and pad to the batch size."""
        rows = num_rows_of(batch)
        # Interleaved, so that hosts have different numbers.
        hosts = self.num_infeed_hosts
        first = self._rows_made * hosts + self.infeed_host_index
        self._rows_made += rows
        return self._number(batch, range(first, first + rows * hosts, hosts))

    def _number(self, batch: NestedMap, numbers: range) -> NestedMap:
        batch.setdefault("eval_sample_weights", np.ones(len(numbers), np.float32))
        if not self.is_training:
            batch.setdefault("provenance", np.array(numbers).astype(np.int32))
        num_missing = self.local_batch_size - len(numbers)
        return pad_rows(batch, num_missing) if num_missing > 0 else batch

    def _reset(self) -> None:
        self._restart_counts()
        self._stop_reading()
        if self._lingvo_input is not None and not tf_data.is_tf_data(self._lingvo_input):
            # A native op, or an iterator that the generator made itself, cannot restart.
            self._lingvo_input = None

    def _stop_reading(self) -> None:
        if self._read is None:
            return
        if tf_data.is_tf_data(self._lingvo_input):
            tf_data.stop(self._lingvo_input.datasource)
        elif self._must_drain:
            # The destructor of a finite native reader waits until its last batches are read.
            with contextlib.suppress(self._tf.errors.OpError):
                while True:
                    self._read()
        self._read = None

    def _close(self) -> None:
        self._stop_reading()
        self._lingvo_input = None

    # States.

    def _reader_state(self) -> dict[str, Any]:
        return {"num_batches": self._num_made, "checksum": self._checksum}

    def _set_reader_state(self, position: dict[str, Any]) -> None:
        """Read the batches before a position again, and check that they are the same."""
        self.reset()
        num_batches = position["num_batches"]
        with contextlib.suppress(StopIteration):  # data that have become shorter
            for _ in range(num_batches):
                self._next()
        if self._checksum == position["checksum"]:
            return
        if self.on_inexact_resume == "new_order":
            _LOG.warning("%r reads other batches than before; records may repeat.", self)
            return
        self.reset()
        raise self._config_error(
            f"the first {num_batches} batches differ from those when the state was written",
            field="on_inexact_resume",
            value=self.on_inexact_resume,
            expected="the same data in the same order, or 'new_order' to resume with other batches",
        )

    def ids_to_strings(
        self, ids: np.ndarray, lengths: np.ndarray | Sequence[int], key: str | None = None
    ) -> list[str]:
        """Return the text of ids, int `[batch, length]`, by the generator's `IdsToStrings`."""
        strings = self.input_inst.IdsToStrings(ids, np.asarray(lengths), key=key)
        strings = strings.numpy() if hasattr(strings, "numpy") else strings
        return [text.decode("utf-8", "replace") for text in strings]


class LingvoInputAdaptorNewBatchSize(LingvoInputAdaptor):
    """An input that splits the batches of a Lingvo input into smaller ones.

    Some generators pack better with more rows. Set `input.bucket_batch_limit` or `input.batch_size`
    to a multiple of `batch_size`.
    """

    batch_size_is_lingvos = False

    def __post_init__(self) -> None:
        """Check the fields, without a current batch."""
        self._current: NestedMap | None = None
        self._current_start = 0
        super().__post_init__()

    def _make_batch(self) -> NestedMap:
        if self._current is None or self._current_start >= num_rows_of(self._current):
            self._current = self._read_lingvo_batch()
            self._current_start = 0
            rows = num_rows_of(self._current)
            # In evaluation, the last batch may be incomplete.
            is_divisor = not self.endless or rows % self.local_batch_size == 0
            expected = f"a divisor of {rows}, the rows of a batch of the Lingvo input"
            require(is_divisor, self._label, "batch_size", self.batch_size, expected)
        part = slice(self._current_start, self._current_start + self.local_batch_size)
        self._current_start = part.stop
        return self._complete(self._current.transform(lambda array: array[part]))

    def _reset(self) -> None:
        super()._reset()
        self._current = None


def _add_to_checksum(batch: NestedMap, checksum: int) -> int:
    """Return the checksum of the batches so far, of their fields and first and last rows.

    It detects another order, or missing and additional records, since these move all later rows. A
    checksum of all rows would cost as much as making them.
    """
    for path, array in batch.flatten_items():
        label = f"{path} {array.dtype.str} {array.shape}".encode()
        ends = array if len(array) <= 2 else array[:: len(array) - 1]
        checksum = zlib.crc32(ends.tobytes(), zlib.crc32(label, checksum))
    return checksum
