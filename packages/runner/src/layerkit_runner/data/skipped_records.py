"""Counts and reports of the records that inputs have skipped because they cannot be read."""

from __future__ import annotations

import sys

import jax

from layerkit_inputs.base.base_input import BaseInput
from layerkit_runner.distributed.cluster import gather_values
from layerkit_runner.observers import Observer

SKIPPED_RECORDS = "skipped_records"
"""Name of the metric that counts skipped records."""


class SkippedRecords:
    """A counter of the records that an input of this process has skipped during training."""

    def __init__(self, dataset: BaseInput, name: str, observers: Observer) -> None:
        """Create a counter for an input, with its name in reports."""
        self._dataset = dataset
        self._name = name
        self._observers = observers
        self._reported = 0

    def scalars(self) -> dict[str, float]:
        """Return the number of skipped records, and report it at first and when it has doubled."""
        count = self._dataset.num_skipped
        if count and count >= 2 * self._reported:
            self._reported = count
            line = skipped_line(self._name, count)
            if jax.process_index() == 0:
                self._observers.message(line)
            else:
                print(f"process {jax.process_index()}: {line}", file=sys.stderr, flush=True)
        return {SKIPPED_RECORDS: float(count)} if count else {}


def report_skipped(dataset: BaseInput, name: str, observers: Observer) -> dict[str, float]:
    """Report the records that all hosts skipped; return the metric of their number."""
    # Processes that read the same rows skip the same records.
    by_feed = dict(gather_values([dataset.infeed_host_index, dataset.num_skipped]))
    count = sum(by_feed.values())
    if not count:
        return {}
    observers.message(skipped_line(name, count))
    return {SKIPPED_RECORDS: float(count)}


def skipped_line(name: str, count: int) -> str:
    """Return the line about skipped records: `heldout: skipped 3 unreadable records so far`."""
    return f"{name}: skipped {count:,} unreadable record{'' if count == 1 else 's'} so far"
