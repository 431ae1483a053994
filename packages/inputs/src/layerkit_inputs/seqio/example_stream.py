"""Streams of examples of SeqIO tasks that can resume at any example.

The state of a `tf.data` pipeline holds all its buffers, about a megabyte. In this module a task is
read shard by shard. A shard is one file of the task (or several, see `num_shards`) and has its own
pipeline, whose seed is derived from the epoch and the index of the shard. So a position is three
numbers, which are valid in any run. Resuming reads the open shard again up to the position, at most
one file per task, and not the whole stream.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from layerkit.config.checks import require
from layerkit.errors import ConfigError
from layerkit_inputs.base.errors import first_line
from layerkit_inputs.base.indexed_input import epoch_order
from layerkit_inputs.seqio.shard_pipelines import Example, ReadOptions, ShardPipelines
from layerkit_inputs.seqio.tasks import import_tensorflow

_MOST_BAD_IN_A_ROW = 100
# In one epoch, all files of a host may be empty.
_MOST_EMPTY_EPOCHS = 16


class NumberedExample(NamedTuple):
    """An example of a stream, with its number and task."""

    number: int
    """Zero-based number in the pass over the data."""
    task: Any
    """The `seqio.Task`."""
    example: Example


class _Opened(NamedTuple):
    """An open shard at its first example."""

    epoch: int
    shard: int
    iterator: Iterator[Example]


class TaskExamples:
    """A stream of the examples of one task, over epochs."""

    def __init__(self, task: Any, options: ReadOptions):
        """List the files of the task; none is opened."""
        self.task = task
        self._options = options
        self._files = list(task.source.list_shards(options.split))
        self.num_shards = self._choose_num_shards()
        self._pipelines = ShardPipelines(
            task, options, num_shards=self.num_shards, buffer_size=self._choose_buffer_size()
        )
        self._iterator: Iterator[Example] | None = None
        self._ahead: _Opened | None = None
        self._in_chunks = True
        self._order: np.ndarray | None = None
        self._epoch = self._shards_done = self._examples_done = 0

    def position(self) -> list[int]:
        """Return epoch, number of shards read in it, and examples read in the next shard."""
        return [self._epoch, self._shards_done, self._examples_done]

    def set_position(self, position: list[int]) -> None:
        """Restore a position."""
        self._move_to(*position)
        self._ahead = None

    def _move_to(self, epoch: int, shards_done: int, examples_done: int) -> None:
        if self._epoch != epoch:
            self._order = None
        self._epoch, self._shards_done, self._examples_done = epoch, shards_done, examples_done
        self._iterator = None
        self._in_chunks = True

    def read(self) -> Example:
        """Return the next example; raise StopIteration at the end of an epoch, unless endless."""
        epochs_without = 0
        while True:
            if self._order is None:
                self._order = self._shard_order(self._epoch)
            order = self._order
            if self._shards_done >= len(order):
                if not self._options.endless:
                    raise StopIteration
                epochs_without += 1
                if epochs_without > _MOST_EMPTY_EPOCHS:
                    share = f"split {self._options.split!r} has no examples for this host"
                    raise ConfigError(f"task {self.task.name}: {share}")
                self._move_to(self._epoch + 1, 0, 0)
                continue
            example = self._read_from(int(order[self._shards_done]))
            if example is not None:
                self._examples_done += 1
                return example
            self._move_to(self._epoch, self._shards_done + 1, 0)

    def _shard_order(self, epoch: int) -> np.ndarray:
        """Return the indices of the shards that this host reads in an epoch."""
        index, count = self._options.share
        if not self._options.shuffle:
            return np.arange(index, self.num_shards, count)
        order = epoch_order(self.num_shards, seed=self._options.seed, epoch=epoch)
        return order[index::count]

    def _read_from(self, shard: int) -> Example | None:
        """Return the next example of a shard, or None at its end."""
        tf = import_tensorflow()
        for _ in range(_MOST_BAD_IN_A_ROW):
            try:
                return self._read_in_chunks(shard) if self._in_chunks else self._read_one(shard)
            except (StopIteration, tf.errors.OutOfRangeError):
                return None
            except (tf.errors.InvalidArgumentError, tf.errors.UnknownError) as error:
                record: int | None = self._examples_done
                problem = error
            except tf.errors.OpError as error:  # an error of the file, whose rest is lost
                record, problem = None, error
            self._options.bad_records.report(
                file=self._name_of(shard), record=record, problem=first_line(problem)
            )
            if record is None:
                return None
        records = f"{_MOST_BAD_IN_A_ROW} consecutive records of {self._name_of(shard)}"
        raise ConfigError(f"{records} cannot be read: {first_line(problem)}")

    def _read_in_chunks(self, shard: int) -> Example:
        try:
            return self._read_one(shard)
        except import_tensorflow().errors.OpError:
            # The next chunk has a bad record, so the rest of the shard is read one by one.
            self._iterator = None
            self._in_chunks = False
            return self._read_one(shard)

    def _read_one(self, shard: int) -> Example:
        if self._iterator is not None:
            return next(self._iterator)
        self._iterator = self._open(shard)
        example = next(self._iterator)
        # After this shard has filled its own buffer.
        self._open_ahead()
        return example

    def _open(self, shard: int) -> Iterator[Example]:
        """Open a shard at the position, or use the one that was opened ahead."""
        ahead, self._ahead = self._ahead, None
        is_whole = self._in_chunks and not self._examples_done
        if is_whole and ahead is not None and ahead[:2] == (self._epoch, shard):
            return ahead.iterator
        return self._pipelines.open(
            shard, epoch=self._epoch, start=self._examples_done, in_chunks=self._in_chunks
        )

    def _open_ahead(self) -> None:
        """Open the next shard, which fills its buffer while the current one is read.

        An error of opening it is raised later, when the shard is read.
        """
        assert self._order is not None
        epoch, rest = self._epoch, self._order[self._shards_done + 1 :]
        if not len(rest) and self._options.endless:
            epoch += 1
            rest = self._shard_order(epoch)
        if self._in_chunks and len(rest):
            with contextlib.suppress(Exception):
                shard = int(rest[0])
                iterator = self._pipelines.open(shard, epoch=epoch, start=0, in_chunks=True)
                self._ahead = _Opened(epoch, shard, iterator)

    def _name_of(self, shard: int) -> str:
        by_file = self.num_shards <= len(self._files)
        files = self._files[shard :: self.num_shards] if by_file else self._files
        return files[0] if len(files) == 1 else f"one of {len(files)} files, first {files[0]}"

    def _choose_num_shards(self) -> int:
        options, num_files = self._options, len(self._files)
        _, hosts = options.share
        expected = f"files for the split {options.split!r}"
        require(num_files, None, f"files of task {self.task.name}", self._files, expected)
        if num_files < hosts:
            logging.getLogger(__name__).warning(
                "task %s has %d files for %d hosts: every host reads all files and keeps its share "
                "of the records",
                self.task.name,
                num_files,
                hosts,
            )
        return max(options.num_shards or num_files, hosts)

    def _choose_buffer_size(self) -> int:
        options = self._options
        size = options.shuffle_buffer_size or self.task.shuffle_buffer_size
        expected = f"False, or a shuffle_buffer_size, since task {self.task.name} has none"
        require(size or not options.shuffle, None, "shuffle", options.shuffle, expected)
        return size or 1


class SequentialTasks:
    """A stream of the examples of each task in order, for evaluation."""

    def __init__(self, tasks: list[TaskExamples], *, endless: bool):
        """Set the tasks; `endless` starts again after the last one."""
        self._tasks = tasks
        self._endless = endless
        self._starts = [task.position() for task in tasks]
        self._task = self._number = 0

    def position(self) -> dict[str, Any]:
        """Return the position as JSON values."""
        at = self._tasks[self._task].position() if self._task < len(self._tasks) else None
        return {"task": self._task, "number": self._number, "at": at}

    def set_position(self, position: dict[str, Any]) -> None:
        """Restore a position."""
        self._task, self._number = position["task"], position["number"]
        for task, start in zip(self._tasks, self._starts, strict=True):
            task.set_position(start)
        if position["at"] is not None:
            self._tasks[self._task].set_position(position["at"])

    def read(self) -> NumberedExample:
        """Return the next example; raise StopIteration after the last task, unless endless."""
        while True:
            if self._task == len(self._tasks):
                if not self._endless or not self._number:
                    raise StopIteration
                self.set_position({"task": 0, "number": 0, "at": None})
            reader = self._tasks[self._task]
            try:
                example = reader.read()
            except StopIteration:
                self._task += 1
                continue
            self._number += 1
            return NumberedExample(self._number - 1, reader.task, example)


class MixedTasks:
    """A stream of examples of endless tasks, each from the task furthest behind its rate."""

    def __init__(self, tasks: list[TaskExamples], rates: list[float]):
        """Set the tasks and their rates, in any unit."""
        self._tasks = tasks
        self._rates: list[float] = (np.array(rates, np.float64) / np.sum(rates)).tolist()
        self._counts = [0] * len(tasks)

    def position(self) -> dict[str, Any]:
        """Return the position as JSON values."""
        return {"counts": list(self._counts), "at": [task.position() for task in self._tasks]}

    def set_position(self, position: dict[str, Any]) -> None:
        """Restore a position."""
        self._counts = list(position["counts"])
        for task, at in zip(self._tasks, position["at"], strict=True):
            task.set_position(at)

    def read(self) -> NumberedExample:
        """Return the next example."""
        number = sum(self._counts)
        behind = [
            rate * (number + 1) - count
            for rate, count in zip(self._rates, self._counts, strict=True)
        ]
        chosen = behind.index(max(behind))
        example = self._tasks[chosen].read()
        self._counts[chosen] += 1
        return NumberedExample(number, self._tasks[chosen].task, example)


ExampleSource = SequentialTasks | MixedTasks
"""A stream of examples whose position is JSON."""
