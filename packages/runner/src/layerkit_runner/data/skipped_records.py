"""Records that an input could not read and left out: said aloud, since data are missing."""

from __future__ import annotations

import sys

import jax

from layerkit_inputs.base_input import BaseInput
from layerkit_runner.distributed.process_exchange import gather_values
from layerkit_runner.observers import Observer

SKIPPED_RECORDS = "skipped_records"
"""Name of the metric."""


class SkippedRecords:
    """Watches an input while it is read, each process its own: training asks no other process.

    Process 0 tells its observers, the others their standard error.
    """

    def __init__(self, dataset: BaseInput, name: str, observers: Observer) -> None:
        self._dataset = dataset
        self._name = name
        self._observers = observers
        self._told = 0

    def scalars(self) -> dict[str, float]:
        """The metric `skipped_records` of this process, where there are any.

        They are told in words as well, the first time and each time their number has doubled.
        """
        count = self._dataset.num_skipped
        if count and count >= 2 * self._told:
            self._told = count
            line = skipped_line(self._name, count)
            if jax.process_index() == 0:
                self._observers.message(line)
            else:
                print(f"process {jax.process_index()}: {line}", file=sys.stderr, flush=True)
        return {SKIPPED_RECORDS: float(count)} if count else {}


def report_skipped(dataset: BaseInput, name: str, observers: Observer) -> dict[str, float]:
    """Reports the records that the hosts left out of a data set; all processes must call it.

    Returns:
      The metric `skipped_records`, over all hosts; empty where nothing was left out.
    """
    # Processes that read the same rows leave out the same records.
    by_feed = dict(gather_values([dataset.infeed_host_index, dataset.num_skipped]))
    count = sum(by_feed.values())
    if not count:
        return {}
    observers.message(skipped_line(name, count))
    return {SKIPPED_RECORDS: float(count)}


def skipped_line(name: str, count: int) -> str:
    """`heldout: 3 records could not be read so far and were left out`."""
    records, were = ("record", "was") if count == 1 else ("records", "were")
    return f"{name}: {count:,} {records} could not be read so far and {were} left out"
