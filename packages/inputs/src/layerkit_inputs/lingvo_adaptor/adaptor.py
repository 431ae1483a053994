"""LingvoInputAdaptor: batches of a Lingvo input generator, from its params.

Lingvo decides what is read, tokenized, bucketed and packed. Added here is what it leaves open: an
order that comes again, one seed a host, an end that is StopIteration, full batches, weights and
numbers of rows, states, and errors in place of aborts. The fields are those of Praxis.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import logging
import warnings
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import numpy as np

from layerkit.nested_map import NestedMap
from layerkit_inputs.bad_records import BadRecordError, OnBadRecord
from layerkit_inputs.base_input import BaseInput
from layerkit_inputs.eval_padding import num_rows_of, pad_rows
from layerkit_inputs.lingvo_adaptor import tf_data
from layerkit_inputs.lingvo_adaptor.native_reads import check_records, words_of
from layerkit_inputs.lingvo_adaptor.native_stream import NativeStream
from layerkit_inputs.lingvo_adaptor.preflight import prepare, watch_native_reads

_LOG = logging.getLogger("layerkit.inputs")


def rows_of_params(params: Any) -> int | None:
    """Rows of a batch that Lingvo params ask for; None where they do not tell."""
    if not hasattr(params, "Get"):
        return None  # no params, which is refused when the input is built
    limits = params.Get("bucket_batch_limit") if "bucket_batch_limit" in params else None
    if limits:
        return int(max(limits))
    rows = params.Get("batch_size") if "batch_size" in params else None
    return int(rows) if rows else None


class LingvoInputAdaptor(BaseInput):
    """A Lingvo input generator as a reader; the batch size is that of the generator.

    A batch holds the generator's fields as numpy arrays, without strings, and
    `eval_sample_weights` (float32 `[batch]`; 0 for the rows that fill a last, short batch); outside
    of training also `provenance` (int32 `[batch]`, from 0; -1 for such rows). Arrays of the
    generator that needed no rows of padding are read-only: they are TensorFlow's own, not copied.

    What the generator does about hosts is its own affair: they are told apart by Lingvo's infeed
    context, and by the seed of files. Many generators ignore the first; evaluate on those by
    LingvoEvalAdaptor, which deals the rows out.
    """

    input: Any = None
    """Params of a Lingvo input generator. Required; they are copied, and never changed."""
    num_batches: int | None = None
    """The data end after this many batches of the generator. None: where it ends by itself."""
    allow_fixed_file_random_seed: bool = False
    """Take an `input.file_random_seed` other than 0; each host adds its index to it, once."""
    cluster_do_eval: bool = False
    """Outside of training, read one epoch in order: Lingvo's `cluster.do_eval`."""
    check_records: bool = True
    """Read native TFRecord files through before the first batch: Lingvo hangs on a damaged one."""
    on_bad_record: OnBadRecord = "refuse"
    """Only `refuse`: Lingvo has no way to skip a damaged record that could be counted."""
    on_inexact_resume: Literal["refuse", "new_order"] = "refuse"
    """What to do about a stream that does not come again as it was: refuse states, or go on with a
    new random order, in which records of this epoch may come twice."""

    def __post_init__(self) -> None:
        self._tf = prepare()
        self._check_lingvo_fields()
        self._params = self.input.Copy()
        self._set_file_random_seed()
        self._cluster = self._make_cluster()
        self._lingvo_input: Any = None
        self._read: Callable[[], Any] | None = None
        self._reads_in_order, self._is_endless = True, False
        self._restart_counts()
        if self.batch_size is None and self._takes_batch_size_from_params():
            self.batch_size = rows_of_params(self._params) or self._rows_of_first_batch()
        super().__post_init__()

    @classmethod
    def get_batch_size(cls, config: Any) -> int | None:
        """Rows of a batch on each host that `config` asks for; None where only a batch can tell."""
        return rows_of_params(config.input)

    @property
    def input_inst(self) -> Any:
        """The Lingvo input generator, for its methods."""
        if self._lingvo_input is None:
            with self._scope(), tf_data.tensorflow_seed(self._order_seed()):
                self._lingvo_input = self._params.Instantiate()
            if tf_data.is_tf_data(self._lingvo_input):
                weakref.finalize(self, tf_data.stop, self._lingvo_input.datasource).atexit = False
        return self._lingvo_input

    # Checks when built.

    def _takes_batch_size_from_params(self) -> bool:
        return True

    def _check_lingvo_fields(self) -> None:
        if not hasattr(self.input, "Instantiate"):
            raise self._config_error(
                f"input={self.input!r}; expected the params of a Lingvo input generator, such as "
                "MyInputGenerator.Params()."
            )
        if self.batch_size is not None and self._takes_batch_size_from_params():
            raise self._config_error(
                f"batch_size={self.batch_size}; the batch size is that of the Lingvo input. Set "
                "input.batch_size or input.bucket_batch_limit, or use "
                "LingvoInputAdaptorNewBatchSize or LingvoEvalAdaptor."
            )
        if self.num_batches is not None and (self.num_batches < 1 or self.is_training):
            raise self._config_error(
                f"num_batches={self.num_batches} with is_training={self.is_training}; expected at "
                "least 1, and only for evaluation: training data are endless."
            )
        if self.on_bad_record != "refuse":
            raise self._config_error(
                f"on_bad_record={self.on_bad_record!r}; Lingvo's readers cannot skip a damaged "
                "record and count it. Leave on_bad_record='refuse', and write the file again."
            )
        if self.on_inexact_resume not in ("refuse", "new_order"):
            raise self._config_error(
                f"on_inexact_resume={self.on_inexact_resume!r}; expected 'refuse' or 'new_order'."
            )

    def _set_file_random_seed(self) -> None:
        seed = self._params.Get("file_random_seed") if "file_random_seed" in self._params else 0
        if not seed:
            return
        if not self.allow_fixed_file_random_seed:
            raise self._config_error(
                f"input.file_random_seed={seed}; a fixed seed makes a restarted run read the same "
                "records again, and hosts may read the same. Set input.file_random_seed=0, or "
                "allow_fixed_file_random_seed=True to have each host add its index to the seed."
            )
        self._params.file_random_seed = seed + self.infeed_host_index

    def _make_cluster(self) -> Any:
        """Lingvo's cluster, which generators ask about the job that they are part of."""
        cluster = copy.deepcopy(importlib.import_module("lingvo.core.cluster_factory").Current())
        cluster.params.xla_device = "tpu"  # fixed shapes, as for any accelerator
        cluster.params.enable_asserts = False
        cluster.params.do_eval = self.cluster_do_eval and not self.is_training
        if cluster.params.do_eval:
            # What do_eval implies, for generators that look at the param and not at the property.
            cluster.params.require_sequential_input_order = True
        return cluster

    @contextlib.contextmanager
    def _scope(self) -> Iterator[None]:
        """Within it, Lingvo sees this input's cluster and host."""
        infeed = importlib.import_module("lingvo.core.cluster").InfeedContextScope
        with infeed(self.infeed_host_index, self.num_infeed_hosts), self._cluster:
            yield

    def _order_seed(self) -> int:
        """Of shuffles in tf.data that have none; hosts differ while training, and only then."""
        seed = (self.input_random_seed or 0) * 1_000_003
        return (seed + (self.infeed_host_index if self.is_training else 0)) % (1 << 31)

    def _rows_of_first_batch(self) -> int:
        try:
            rows = num_rows_of(self._read_lingvo_batch())
        except StopIteration:
            raise self._config_error("there are no rows to read.") from None
        self._reset()
        return rows

    # Reading.

    def _open(self) -> None:
        """Makes what reads batches, at the first of them, where there is none."""
        if self._read is not None:
            return
        generator = self.input_inst
        with watch_native_reads() as native, warnings.catch_warnings():
            # Generators make summaries, which nobody reads here.
            warnings.filterwarnings("ignore", message=".*support for TF1 summary ops")
            try:
                with self._scope(), tf_data.tensorflow_seed(self._order_seed()):
                    if tf_data.is_tf_data(generator):
                        dataset = tf_data.start_over(self._tf, generator.datasource)
                        is_endless = tf_data.is_endless(self._tf, dataset)
                        read = generator.GetPreprocessedInputBatch
                    else:
                        # Traced once, since each trace of a native op reads from the start.
                        traced = self._tf.function(generator.GetPreprocessedInputBatch)
                        read, is_endless = traced.get_concrete_function(), False
            except Exception as error:
                # TensorFlow makes another error of one in a function that it traces.
                if native.error is None:
                    raise
                if isinstance(native.error, ValueError):
                    raise self._config_error(str(native.error)) from None
                raise native.error from error
        self._reads_in_order = all(one.in_order for one in native.checked)
        self._is_endless = is_endless or any(one.is_endless for one in native.checked)
        if self.check_records:
            self._check_files([file for one in native.checked for file in one.files])
        self._read = read
        if native.checked and not self._is_endless:
            self._read = NativeStream(read, errors=self._tf.errors, owner=self)

    def _refuse_endless_epoch(self) -> None:
        if self._is_endless and not self.endless and self.num_batches is None:
            raise self._config_error(
                "one epoch is to be read, but the Lingvo input never ends. Set "
                "cluster_do_eval=True, and repeat_count=1 on a native input; or num_batches here; "
                "or repeat=True with eval_loop_num_batches."
            )

    def _check_files(self, files: list[Any]) -> None:
        try:
            num_records = check_records(files)
        except BadRecordError as error:
            raise BadRecordError(str(self._config_error(str(error)))) from None
        if files and not num_records and all(file.record_type != "text" for file in files):
            raise self._config_error(f"there are no records in {[file.path for file in files]}.")

    def _read_lingvo_batch(self) -> NestedMap:
        """The generator's next batch, as numpy arrays `[rows, ...]`, without strings."""
        if self._num_read == self._most_reads():
            raise StopIteration
        self._open()
        assert self._read is not None
        try:
            with self._scope():
                batch = self._read()
            self._num_read += 1
        except self._tf.errors.OutOfRangeError:
            raise StopIteration from None
        except self._tf.errors.OpError as error:
            generator = self._params.cls.__qualname__
            problem = f"{generator} cannot read on, at its batch {self._num_read}: "
            raise BadRecordError(
                str(self._config_error(problem + words_of(error.message)))
            ) from error
        arrays = self._as_arrays(batch)
        if not any(True for _ in arrays.flatten_items()):
            raise self._config_error(
                f"a batch of fields {sorted(batch)} holds nothing but strings."
            )
        return arrays

    def _as_arrays(self, batch: Any, path: str = "") -> NestedMap:
        arrays = NestedMap()
        for name, value in batch.items():
            if isinstance(value, dict):
                arrays[name] = self._as_arrays(value, f"{path}{name}.")
            elif (dtype := getattr(value, "dtype", None)) is None:
                raise self._config_error(
                    f"field {path}{name} of the batch is a {type(value).__name__}; expected a "
                    "tensor, or a NestedMap of tensors."
                )
            elif dtype is not self._tf.string:
                # A view of the tensor, which nobody may change: TensorFlow may give it again.
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
        self._refuse_endless_epoch()
        batch = self._make_batch()
        self._num_made += 1
        self._checksum = _add_to_checksum(batch, self._checksum)
        return batch

    def _make_batch(self) -> NestedMap:
        return self._complete(self._read_lingvo_batch())

    def _complete(self, batch: NestedMap) -> NestedMap:
        """Weights and numbers for the rows, and rows of padding up to the batch size."""
        rows = _num_rows_of_arrays(batch)
        if rows > self.local_batch_size:
            raise self._config_error(
                f"the Lingvo input made a batch of {rows} rows, after one of or a param for "
                f"{self.local_batch_size}; batches must have one size."
            )
        # Interleaved, so that no number stands for rows of two hosts.
        hosts = self.num_infeed_hosts
        first = self._rows_made * hosts + self.infeed_host_index
        self._rows_made += rows
        return self._number(batch, range(first, first + rows * hosts, hosts))

    def _number(self, batch: NestedMap, numbers: range) -> NestedMap:
        batch.setdefault("eval_sample_weights", np.ones(len(numbers), np.float32))
        if not self.is_training:
            batch.setdefault("provenance", np.array(numbers).astype(np.int32))
        num_missing = self.local_batch_size - len(numbers)
        return pad_rows(batch, num_missing) if num_missing else batch

    def _reset(self) -> None:
        self._restart_counts()
        self._stop_reading()
        if self._lingvo_input is not None and not tf_data.is_tf_data(self._lingvo_input):
            # A native op, and an iterator that a generator made for itself, cannot be rewound.
            self._lingvo_input = None

    def _stop_reading(self) -> None:
        if isinstance(self._read, NativeStream):
            self._read.drain()
        elif self._read is not None and tf_data.is_tf_data(self._lingvo_input):
            tf_data.stop(self._lingvo_input.datasource)
        self._read = None

    def _close(self) -> None:
        self._stop_reading()
        self._lingvo_input = None

    # States.

    def get_state(self) -> dict[str, Any]:
        """Where the stream stands: how many batches were made, and a checksum of their ends.

        Raises:
          ValueError: the records come at random, so no state brings them back, and
            `on_inexact_resume` is `refuse`.
        """
        self._open()
        if not self._reads_in_order and self.on_inexact_resume == "refuse":
            raise self._refuse_random_order("no state can bring its batches back")
        return super().get_state()

    def _reader_state(self) -> dict[str, Any]:
        return {"num_batches": self._num_made, "checksum": self._checksum}

    def _set_reader_state(self, position: dict[str, Any]) -> None:
        self.reset()
        self._open()
        if not self._reads_in_order:
            if self.on_inexact_resume == "refuse":
                raise self._refuse_random_order("it cannot go on from a state")
            _LOG.warning("%r goes on in a new random order; records may come again.", self)
            self._num_made, self._checksum = position["num_batches"], position["checksum"]
            return
        self._read_past(position)

    def _read_past(self, position: dict[str, Any]) -> None:
        """Reads the batches before a position again, and makes sure that they are the same."""
        wanted = position["num_batches"]
        try:
            for _ in range(wanted):
                self._next()
        except StopIteration:
            made = self._num_made
            self.reset()
            raise self._config_error(
                f"the state stands after batch {wanted}, but the data end after {made}. Restore "
                "with the data and fields it was written with."
            ) from None
        if self._checksum == position["checksum"]:
            return
        if self.on_inexact_resume == "new_order":
            _LOG.warning("%r reads other batches than before; records may come again.", self)
            return
        self.reset()
        raise self._config_error(
            f"the first {wanted} batches are not those that were read when the state was written: "
            "the data have changed, or the Lingvo input draws at random in a way that no seed "
            "reaches. Restore with the same data, or set on_inexact_resume='new_order' to go on "
            "all the same; records may then come again."
        )

    def _refuse_random_order(self, consequence: str) -> ValueError:
        return self._config_error(
            f"this Lingvo input reads records at random, as its threads get to them, so "
            f"{consequence}. Set on_inexact_resume='new_order' to let a restored run go on in a "
            "new random order (records of the epoch may come again), or use a reader with exact "
            "states."
        )

    def ids_to_strings(
        self, ids: np.ndarray, lengths: np.ndarray | Sequence[int], key: str | None = None
    ) -> list[str]:
        """Text of ids int `[batch, length]`, by the generator's `IdsToStrings` and tokenizers."""
        generator = self.input_inst
        if not hasattr(generator, "IdsToStrings"):
            raise self._config_error(f"{type(generator).__qualname__} has no IdsToStrings.")
        strings = generator.IdsToStrings(ids, np.asarray(lengths), key=key)
        strings = strings.numpy() if hasattr(strings, "numpy") else strings
        return [text.decode("utf-8", "replace") for text in strings]


class LingvoInputAdaptorNewBatchSize(LingvoInputAdaptor):
    """Smaller batches, cut from those of a Lingvo input.

    Some generators pack better the more rows they have at hand; give them many by
    `input.bucket_batch_limit` or `input.batch_size`, a multiple of `batch_size`.
    """

    def __post_init__(self) -> None:
        self._current: NestedMap | None = None
        self._current_start = 0
        super().__post_init__()

    @classmethod
    def get_batch_size(cls, config: Any) -> int | None:
        """The config's own `batch_size`."""
        return config.batch_size

    def _takes_batch_size_from_params(self) -> bool:
        return False

    def _check_fields(self) -> None:
        super()._check_fields()
        self._check_multiple(rows_of_params(self._params) or self.local_batch_size)

    def _check_multiple(self, rows: int) -> None:
        if rows % self.local_batch_size:
            raise self._config_error(
                f"batch_size={self.batch_size}, cut from batches of {rows} rows of the Lingvo "
                f"input; expected {rows} to be a multiple of it."
            )

    def _make_batch(self) -> NestedMap:
        if self._current is None or self._current_start >= num_rows_of(self._current):
            self._current = self._read_lingvo_batch()
            self._current_start = 0
            if self.endless:  # else it may be the last one, which is filled
                self._check_multiple(num_rows_of(self._current))
        part = slice(self._current_start, self._current_start + self.local_batch_size)
        self._current_start = part.stop
        return self._complete(self._current.transform(lambda array: array[part]))

    def _reset(self) -> None:
        super()._reset()
        self._current = None


def _num_rows_of_arrays(batch: NestedMap) -> int:
    """As `num_rows_of`, which looks closer where this does not find one number."""
    sizes = {array.shape[:1] for _, array in batch.flatten_items()}
    return next(iter(sizes))[0] if len(sizes) == 1 and () not in sizes else num_rows_of(batch)


def _add_to_checksum(batch: NestedMap, checksum: int) -> int:
    """A checksum of all batches so far: of their fields, and of the first and last row of each.

    It tells a stream that comes in another order, or with records more or fewer, since then the
    rows that follow stand elsewhere. To read every row again would cost as much as making it.
    """
    for path, array in batch.flatten_items():
        label = _label(path, array.dtype, array.shape)
        ends = array if len(array) <= 2 else array[:: len(array) - 1]
        checksum = zlib.crc32(ends.tobytes(), zlib.crc32(label, checksum))
    return checksum


@functools.lru_cache(maxsize=1024)  # the same few for every batch
def _label(path: str, dtype: np.dtype, shape: tuple[int, ...]) -> bytes:
    return f"{path} {dtype.str} {shape}".encode()
