"""`tf.data` pipelines that read the shards of a SeqIO task.

Transferring single examples out of `tf.data`, and making a pipeline, are the main costs. Examples
are therefore transferred in chunks. `tf.data` starts to prefetch them when a shard is opened. A
pipeline that does not depend on the epoch is made once for each of the first 64 shards.

An error loses the whole chunk. The reader then opens the shard again at its position and reads
single examples (`in_chunks=False`), which identifies the bad record.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from layerkit.errors import ConfigError
from layerkit_inputs.base.errors import BadRecords
from layerkit_inputs.seqio.tasks import import_seqio, import_tensorflow

_CHUNK_EXAMPLES = 64
_CHUNKS_AHEAD = 2
_MOST_KEPT = 64

# SeqIO passes seeds to preprocessors through a module global, so only one thread may build a
# pipeline at a time.
_PIPELINE_LOCK = threading.Lock()

Example = Mapping[str, np.ndarray]
"""Token ids int32 `[tokens]` by feature, and other outputs of the preprocessors."""


class ReadOptions(NamedTuple):
    """Options for reading the tasks of an input."""

    split: str
    feature_lengths: Mapping[str, int]
    trim_output_features: bool
    shuffle: bool
    shuffle_buffer_size: int | None
    seed: int
    num_shards: int | None
    """Number of parts of an epoch. None: one per file, or one per host if there are fewer files."""
    share: tuple[int, int]
    """Index of this host and number of hosts that divide the shards; `(0, 1)` reads all shards."""
    endless: bool
    whole_examples: bool
    """True to keep all outputs of preprocessors, for metrics; else only `feature_lengths`."""
    bad_records: BadRecords


class _Datasets(NamedTuple):
    """Data sets of one shard, unshuffled."""

    examples: Any
    """Examples of the task."""
    with_lengths: Any
    """Values of `features` and their lengths, or None if examples cannot be read in chunks."""
    features: Sequence[str]


@dataclasses.dataclass
class ShardPipelines:
    """Pipelines of the shards of one task."""

    task: Any
    """The `seqio.Task`."""
    options: ReadOptions
    num_shards: int
    """Number of parts of its files."""
    buffer_size: int
    """Number of examples in the shuffle buffer, if examples are shuffled."""

    def __post_init__(self) -> None:
        """Start without pipelines; no file is opened."""
        self._kept: dict[int, _Datasets] = {}

    def open(self, shard: int, *, epoch: int, start: int, in_chunks: bool) -> Iterator[Example]:
        """Return an iterator of the examples of one shard in one epoch; it raises tf.data's errors.

        Args:
          shard: Index of the shard.
          epoch: Epoch, which determines the order if examples are shuffled.
          start: Number of examples to skip.
          in_chunks: True to transfer examples in chunks if possible. An error then may come up to
            a chunk early.
        """
        options = self.options
        key = np.random.SeedSequence([options.seed, epoch, shard])
        seed = int(key.generate_state(1)[0] >> 1)
        made = self._datasets_of(shard, seed)
        skips_bad_records = options.bad_records.policy == "skip"
        if in_chunks and made.with_lengths is not None and not (skips_bad_records and start):
            dataset = self._shuffle(made.with_lengths, seed).skip(start)
            # Features that are trimmed differ little in length.
            is_padded = options.trim_output_features
            batch = dataset.padded_batch if is_padded else dataset.ragged_batch
            return _split_chunks(
                _run(batch(_CHUNK_EXAMPLES).prefetch(_CHUNKS_AHEAD)), made.features
            )
        dataset = self._shuffle(made.examples, seed)
        if skips_bad_records:
            return _skip_past_errors(_run(dataset), start)
        return _run(dataset.skip(start))

    def _shuffle(self, dataset: Any, seed: int) -> Any:
        if not self.options.shuffle:
            return dataset
        return dataset.shuffle(self.buffer_size, seed=seed)

    def _datasets_of(self, shard: int, seed: int) -> _Datasets:
        """Return the unshuffled data sets of a shard."""
        if shard in self._kept:
            return self._kept[shard]
        seqio, options = import_seqio(), self.options
        one_of_several = self.num_shards > 1
        with _PIPELINE_LOCK:
            examples = self._checked_task(shard).get_dataset(
                options.feature_lengths,
                split=options.split,
                shuffle=False,  # examples are shuffled later
                seed=seed,
                shard_info=seqio.ShardInfo(shard, self.num_shards) if one_of_several else None,
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
        """Return the task with a check of the number of records, if its source knows it.

        Otherwise a file that was cut between two records would look like a shorter file.
        """
        source, task = self.task.source, copy.copy(self.task)
        if not isinstance(source, import_seqio().TfdsDataSource):
            return task
        files = source.tfds_dataset.files(self.options.split)
        takes = [file.take for file in files]
        expected = sum(takes[shard :: self.num_shards] if self.num_shards <= len(files) else takes)
        check = import_tensorflow().data.experimental.assert_cardinality(expected)
        counted = copy.copy(source)
        counted.get_dataset = lambda **arguments: source.get_dataset(**arguments).apply(check)
        task._source = counted
        return task

    def _features_in_chunks(self, specs: Any) -> Sequence[str]:
        """Return the features to read in chunks, or none if examples cannot be read in chunks."""
        tensor_spec = import_tensorflow().TensorSpec
        if self.options.whole_examples or not isinstance(specs, Mapping):
            return ()
        features = [name for name in self.options.feature_lengths if name in specs]
        for spec in (specs[name] for name in features):
            if not isinstance(spec, tensor_spec) or spec.shape.rank != 1:
                return ()
        return features


def _measured(dataset: Any, features: Sequence[str]) -> Any:
    """Return a data set of the features of each example and their lengths, int32 `[features]`."""
    tf = import_tensorflow()

    @tf.autograph.experimental.do_not_convert
    def measure(example: Mapping[str, Any]) -> tuple[Any, ...]:
        values = [example[name] for name in features]
        return *values, tf.stack([tf.size(value) for value in values])

    return dataset.map(measure)


def _split_chunks(chunks: Iterator[Any], features: Sequence[str]) -> Iterator[Example]:
    for *columns, lengths in chunks:
        rows = map(_rows_of, columns, lengths.T.tolist())
        for values in zip(*rows, strict=True):
            yield dict(zip(features, values, strict=True))


def _rows_of(column: Any, lengths: Sequence[int]) -> list[np.ndarray]:
    """Return the rows of a padded or ragged batch."""
    if isinstance(column, np.ndarray):
        return [row[:length] for row, length in zip(column, lengths, strict=True)]
    ends = column.row_splits.tolist()
    return [column.values[start:end] for start, end in itertools.pairwise(ends)]


def _run(dataset: Any) -> Iterator[Any]:
    """Iterate over the elements as NumPy arrays, in a deterministic order."""
    return _fix_order(dataset).as_numpy_iterator()


def _fix_order(dataset: Any) -> Any:
    options = import_tensorflow().data.Options()
    options.deterministic = True
    options.experimental_warm_start = True
    # Autotuning delays the release of a pipeline; the older the pipeline, the longer the delay.
    # With autotuning off, maps with AUTOTUNE still run in parallel.
    options.autotune.enabled = False
    # The optimizations cost more at the opening of each shard than they gain.
    options.experimental_optimization.apply_default_optimizations = False
    return dataset.with_options(options)


def _is_repeatable(dataset: Any) -> bool:
    """Return whether every epoch can reuse the pipeline.

    It can if the pipeline has no external state and no op that reads the seed, which are shuffles
    and sources of random numbers.
    """
    tf = import_tensorflow()
    fail_on_state = 2
    try:
        serialized = tf.raw_ops.DatasetToGraphV2(
            input_dataset=tf.data.experimental.to_variant(dataset),
            external_state_policy=fail_on_state,
        )
    except tf.errors.OpError:
        return False
    graph = tf.compat.v1.GraphDef.FromString(serialized.numpy())
    nodes = [*graph.node, *(node for one in graph.library.function for node in one.node_def)]
    return not any("Shuffle" in node.op or "Random" in node.op for node in nodes)


def _skip_past_errors(iterator: Iterator[Example], count: int) -> Iterator[Example]:
    """Skip `count` examples and return the iterator; `tf.data`'s `skip` ends at a bad record.

    Raises:
      ConfigError: The shard has fewer examples.
      OpError: A file cannot be read.
    """
    errors = import_tensorflow().errors
    while count:
        try:
            next(iterator)
        except StopIteration:
            problem = f"a shard has {count} examples fewer than when the state was written"
            raise ConfigError(problem) from None
        except (errors.InvalidArgumentError, errors.UnknownError):
            continue  # a bad record, which was counted when it was first read
        count -= 1
    return iterator
