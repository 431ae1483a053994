"""The `tf.data` pipelines that read the shards of a SeqIO task.

What costs in reading through `tf.data` is the way out of it, example by example, and making a
pipeline. So examples come in chunks of ragged batches, cut apart here, which `tf.data` makes ahead
on its own threads; and a pipeline that would come out the same in every epoch is made once.

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
        self._kept: dict[int, Any] = {}

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
        dataset = self._examples_of(shard, seed)
        if options.shuffle:
            dataset = dataset.shuffle(self._buffer_size, seed=seed)
        skips_bad_records = options.bad_records.policy == "skip"
        if in_chunks and not (skips_bad_records and start):
            features = self._features_in_chunks(dataset.element_spec)
            if features:
                chunks = _in_chunks(dataset.skip(start), features)
                return _examples_of_chunks(_run(chunks), features)
        if skips_bad_records:
            return _skip_past_errors(_run(dataset), start)
        return _run(dataset.skip(start))

    def _examples_of(self, shard: int, seed: int) -> Any:
        """The task's own data set of a shard, in order."""
        if shard in self._kept:
            return self._kept[shard]
        seqio, options = import_seqio(), self._options
        one_of_several = self._num_shards > 1
        with _MAKING:
            dataset = self._checked_task(shard).get_dataset(
                options.feature_lengths,
                split=options.split,
                shuffle=False,  # one file has no order to shuffle, and examples are shuffled later
                seed=seed,
                shard_info=seqio.ShardInfo(shard, self._num_shards) if one_of_several else None,
                num_epochs=1,
                trim_output_features=options.trim_output_features,
                try_in_mem_cache=False,
            )
        if len(self._kept) < _MOST_KEPT and _is_repeatable(dataset):
            self._kept[shard] = dataset
        return dataset

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


def _in_chunks(dataset: Any, features: Sequence[str]) -> Any:
    """Ragged batches of the features."""
    if set(dataset.element_spec) != set(features):
        select = import_tensorflow().autograph.experimental.do_not_convert(
            lambda example: {name: example[name] for name in features}
        )
        dataset = dataset.map(select)
    return dataset.ragged_batch(_CHUNK_EXAMPLES).prefetch(_CHUNKS_AHEAD)


def _examples_of_chunks(chunks: Iterator[Any], features: Sequence[str]) -> Iterator[Example]:
    for chunk in chunks:
        columns = [_rows_of(chunk[name]) for name in features]
        for values in zip(*columns, strict=True):
            yield dict(zip(features, values, strict=True))


def _rows_of(column: Any) -> list[np.ndarray]:
    """The rows of a ragged batch; of one that is none, all rows being of one length, as well."""
    if isinstance(column, np.ndarray):
        return list(column)
    ends = column.row_splits.tolist()
    return [column.values[start:end] for start, end in itertools.pairwise(ends)]


def _run(dataset: Any) -> Iterator[Any]:
    """The elements as numpy arrays, in an order that comes again."""
    options = import_tensorflow().data.Options()
    options.deterministic = True
    # Its tuner waits before it lets go of a pipeline, the longer the older that is. Without it,
    # maps with AUTOTUNE still make their calls side by side.
    options.autotune.enabled = False
    # They cost more at the opening of each shard than they gain.
    options.experimental_optimization.apply_default_optimizations = False
    return dataset.with_options(options).as_numpy_iterator()


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
