"""The `tf.data` pipelines that read the shards of a SeqIO task.

What costs in reading through `tf.data` is the way out of it, example by example, and making a
pipeline. So examples come in chunks, cut apart here, which `tf.data` makes ahead on its own
threads, from the opening of a shard on; and a pipeline that would come out the same in every epoch
is made once.

A chunk with a bad record is lost as a whole. Whoever reads opens the shard again where it stands,
and goes on one by one (`in_chunks=False`), which tells the record.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from layerkit_inputs.bad_records import BadRecords
from layerkit_inputs.seqio_adaptor.tasks import Refuse, import_seqio, import_tensorflow
from layerkit_inputs.tensor_iterator import TensorIterator, has_tensors_only

_CHUNK_EXAMPLES = 64
_CHUNKS_AHEAD = 2
_MOST_KEPT = 64

# Ops of pipelines that give the same examples each time they are read, whatever the seed. A
# pipeline with any other, such as a shuffle or `Dataset.random`, is made anew for every epoch.
_REPEATABLE = frozenset(
    (
        *("AssertCardinality", "Batch", "Cache", "Concatenate", "Filter", "FixedLengthRecord"),
        *("FlatMap", "Interleave", "Map", "Options", "PaddedBatch", "ParallelBatch"),
        *("ParallelInterleave", "ParallelMap", "Prefetch", "Range", "Rebatch", "Shard", "Skip"),
        *("TFRecord", "Take", "TakeWhile", "Tensor", "TensorSlice", "TextLine", "Unbatch"),
        *("Window", "Zip"),
    )
)

# SeqIO hands seeds to preprocessors through a global of its module.
_MAKING = threading.Lock()

Example = Mapping[str, np.ndarray]
"""Feature -> token ids int32 `[tokens]`; also what else the task's preprocessors left."""


class ReadOptions(NamedTuple):
    """How the tasks of an input are read."""

    split: str
    feature_lengths: Mapping[str, int]
    trim_output_features: bool
    shuffle: bool
    shuffle_buffer_size: int | None
    seed: int
    num_shards: int | None
    """Parts of an epoch. None: every file is one."""
    share: tuple[int, int]
    """Which host this is among how many that divide the shards; `(0, 1)` to read all of them."""
    endless: bool
    whole_examples: bool
    """Give all that preprocessors left, as metrics may ask for; else `feature_lengths` alone."""
    bad_records: BadRecords
    refuse: Refuse


class _Datasets(NamedTuple):
    """Of one shard, in order."""

    examples: Any
    """As the task makes them."""
    measured: Any
    """Values of `features`, and their lengths; None where examples cannot come in chunks."""
    features: Sequence[str]


class ShardPipelines:
    """Opens the shards of one task."""

    def __init__(self, task: Any, options: ReadOptions, *, num_shards: int, buffer_size: int):
        """Opens nothing yet.

        Args:
          task: `seqio.Task`.
          options: How to read it.
          num_shards: Into how many parts its files are divided.
          buffer_size: Examples that are shuffled together, where they are shuffled.
        """
        self._task = task
        self._options = options
        self._num_shards = num_shards
        self._buffer_size = buffer_size
        self._kept: dict[int, _Datasets] = {}

    def open(self, shard: int, *, epoch: int, start: int, in_chunks: bool) -> Iterator[Example]:
        """The examples of one shard in one epoch, from number `start` on; raises what tf.data does.

        Args:
          shard: Its number.
          epoch: Which order of the examples, where they are shuffled.
          start: How many examples to leave out.
          in_chunks: Fetch many at a time where that can be done; an error may then come as many
            examples too early.
        """
        options = self._options
        key = np.random.SeedSequence([options.seed, epoch, shard])
        seed = int(key.generate_state(1)[0] >> 1)
        made = self._datasets_of(shard, seed)
        skips_bad_records = options.bad_records.policy == "skip"
        if in_chunks and made.measured is not None and not (skips_bad_records and start):
            dataset = self._from(start, self._shuffled(made.measured, seed))
            chunks = self._in_chunks(dataset).prefetch(_CHUNKS_AHEAD)
            return _examples_of_chunks(_run_tensors(chunks), made.features)
        dataset = self._shuffled(made.examples, seed)
        if skips_bad_records:
            return _skip_past_errors(_run(dataset), start)
        return _run(self._from(start, dataset))

    def _shuffled(self, dataset: Any, seed: int) -> Any:
        if not self._options.shuffle:
            return dataset
        return dataset.shuffle(self._buffer_size, seed=seed)

    def _from(self, start: int, dataset: Any) -> Any:
        return dataset.skip(start) if start else dataset

    def _in_chunks(self, dataset: Any) -> Any:
        """Several examples as one element: padded, where their lengths have a bound."""
        if self._options.trim_output_features:
            return dataset.padded_batch(_CHUNK_EXAMPLES)
        return dataset.ragged_batch(_CHUNK_EXAMPLES)

    def _datasets_of(self, shard: int, seed: int) -> _Datasets:
        """The task's own data sets of a shard, in order."""
        if shard in self._kept:
            return self._kept[shard]
        seqio, options = import_seqio(), self._options
        one_of_several = self._num_shards > 1
        with _MAKING:
            examples = self._checked_task(shard).get_dataset(
                options.feature_lengths,
                split=options.split,
                shuffle=False,  # one file has no order to shuffle, and examples are shuffled later
                seed=seed,
                shard_info=seqio.ShardInfo(shard, self._num_shards) if one_of_several else None,
                num_epochs=1,
                trim_output_features=options.trim_output_features,
                try_in_mem_cache=False,
            )
        features = self._features_in_chunks(examples.element_spec)
        made = _Datasets(examples, _measured(examples, features) if features else None, features)
        if len(self._kept) < _MOST_KEPT and _is_repeatable(examples):
            self._kept[shard] = made
        return made

    def _checked_task(self, shard: int) -> Any:
        """The task, of which a source that knows how many records there are must give as many.

        A file that ends early, cut between two records, would pass for a shorter one.
        """
        source, task = self._task.source, copy.copy(self._task)
        if not isinstance(source, import_seqio().TfdsDataSource):
            return task
        files = source.tfds_dataset.files(self._options.split)
        takes = [file.take for file in files]
        expected = sum(
            takes[shard :: self._num_shards] if self._num_shards <= len(files) else takes
        )
        check = import_tensorflow().data.experimental.assert_cardinality(expected)
        counted = copy.copy(source)
        counted.get_dataset = lambda **arguments: source.get_dataset(**arguments).apply(check)
        task._source = counted
        return task

    def _features_in_chunks(self, specs: Any) -> Sequence[str]:
        """Features to fetch; none where they cannot be laid end to end, or more is asked for."""
        tensor_spec = import_tensorflow().TensorSpec
        if self._options.whole_examples or not isinstance(specs, Mapping):
            return ()
        features = [name for name in self._options.feature_lengths if name in specs]
        for spec in (specs[name] for name in features):
            if not isinstance(spec, tensor_spec) or spec.shape.rank != 1:
                return ()
        return features


def _measured(dataset: Any, features: Sequence[str]) -> Any:
    """The features of each example and, last, their lengths, int32 `[features]`."""
    tf = import_tensorflow()

    @tf.autograph.experimental.do_not_convert
    def measure(example: Mapping[str, Any]) -> tuple[Any, ...]:
        values = [example[name] for name in features]
        return *values, tf.stack([tf.size(value) for value in values])

    return dataset.map(measure)


def _examples_of_chunks(chunks: Iterator[Any], features: Sequence[str]) -> Iterator[Example]:
    for *columns, lengths in chunks:
        rows = map(_rows_of, columns, lengths.T.tolist())
        for values in zip(*rows, strict=True):
            yield dict(zip(features, values, strict=True))


def _rows_of(column: Any, lengths: Sequence[int]) -> list[np.ndarray]:
    """The rows of a padded or ragged batch."""
    if isinstance(column, np.ndarray):
        return [row[:length] for row, length in zip(column, lengths, strict=True)]
    ends = column.row_splits.tolist()
    return [column.values[start:end] for start, end in itertools.pairwise(ends)]


def _run(dataset: Any) -> Iterator[Any]:
    """The elements as numpy arrays, in an order that comes again."""
    return _in_fixed_order(dataset).as_numpy_iterator()


def _run_tensors(dataset: Any) -> Iterator[Any]:
    """As `_run`, begun at once, for a flat tuple of features."""
    tf = import_tensorflow()
    dataset = _in_fixed_order(dataset)
    if not has_tensors_only(tf, dataset):
        return dataset.as_numpy_iterator()
    return _elements_of(TensorIterator(tf, dataset))


def _elements_of(iterator: TensorIterator) -> Iterator[list[np.ndarray]]:
    end = import_tensorflow().errors.OutOfRangeError
    while True:
        try:
            tensors = iterator.get_next()
        except end:
            return
        yield [np.asarray(tensor) for tensor in tensors]


def _in_fixed_order(dataset: Any) -> Any:
    options = import_tensorflow().data.Options()
    options.deterministic = True
    options.experimental_warm_start = True
    # Its tuner waits before it lets go of a pipeline, the longer the older that is. Without it,
    # maps with AUTOTUNE still make their calls side by side.
    options.autotune.enabled = False
    # They cost more at the opening of each shard than they gain.
    options.experimental_optimization.apply_default_optimizations = False
    return dataset.with_options(options)


def _is_repeatable(dataset: Any) -> bool:
    """Whether the pipeline has no state and no seed: TensorFlow sees none, nor do its ops."""
    tf = import_tensorflow()
    refuse_state = 2
    try:
        serialized = tf.raw_ops.DatasetToGraphV2(
            input_dataset=tf.data.experimental.to_variant(dataset),
            external_state_policy=refuse_state,
        )
    except tf.errors.OpError:
        return False
    graph = tf.compat.v1.GraphDef.FromString(serialized.numpy())
    nodes = [*graph.node, *(node for one in graph.library.function for node in one.node_def)]
    kinds = {node.op.partition("Dataset")[0] for node in nodes if "Dataset" in node.op}
    return kinds <= _REPEATABLE


def _skip_past_errors(iterator: Iterator[Example], count: int) -> Iterator[Example]:
    """Goes on after `count` examples. TensorFlow's own `skip` ends at the first bad record."""
    errors = import_tensorflow().errors
    while count:
        with contextlib.suppress(errors.OpError):  # counted when it was met first
            next(iterator)
            count -= 1
    return iterator
