"""What is in a folder of checkpoints, for people: one line's worth of each step.

Nothing is changed, and no array is read.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath

from layerkit_runner.checkpointing import (
    evaluations,
    folders,
    formats,
    integrity,
    step_metadata,
)
from layerkit_runner.checkpointing.policy import SavedStep

_ORBAX_METADATA = "_CHECKPOINT_METADATA"


@dataclasses.dataclass(frozen=True)
class StepSummary:
    """A committed step.

    Attributes:
      step: the training step.
      time: when it was saved, UTC.
      num_bytes: of all its files.
      state_format: how the state is stored.
      process_count: of the job that wrote it; None if its metadata cannot be read.
      damage: findings that make it unusable.
      metrics: what evaluations at this step found, by `data set/metric`.
      reasons: the rules by which it stays, in words; empty: it goes with the next save. None: it
        was written without saying by which rules.
    """

    step: int
    time: datetime.datetime
    num_bytes: int
    state_format: formats.StateFormat
    process_count: int | None
    damage: Sequence[integrity.Finding]
    metrics: Mapping[str, float]
    reasons: tuple[str, ...] | None


def summarize(directory: epath.Path, *, read_files: bool) -> list[StepSummary]:
    """Returns the committed steps of a folder, in rising order.

    Args:
      directory: of the checkpoints.
      read_files: whether damage is looked for by reading every file in full, not by sizes alone.

    Raises:
      NewerManifestError: a later version of this package wrote a step.
    """
    found = evaluations.read(directory)
    check = integrity.verify if read_files else integrity.compare_sizes
    summaries, newest_policy = [], None
    for step in folders.committed_steps(directory):
        path = folders.step_folder(directory, step)
        about = _metadata(path)
        newest_policy = step_metadata.policy_of(about)
        summaries.append(
            StepSummary(
                step=step,
                time=saved_at(path),
                num_bytes=sum(integrity.file_sizes(path).values()),
                state_format=formats.format_of(path / "state"),
                process_count=about.get("process_count"),
                damage=[finding for finding in check(path) if finding.is_damage],
                metrics=found.get(step, {}),
                reasons=None,
            )
        )
    if newest_policy is None:
        return summaries
    saved = [SavedStep(summary.step, summary.time, summary.metrics) for summary in summaries]
    reasons = newest_policy.reasons_to_keep(saved)
    return [dataclasses.replace(summary, reasons=reasons[summary.step]) for summary in summaries]


def saved_at(step_directory: epath.Path) -> datetime.datetime:
    """Returns when a step was committed, UTC; by its folder's date where it does not say so."""
    try:
        nanoseconds = json.loads((step_directory / _ORBAX_METADATA).read_text())[
            "commit_timestamp_nsecs"
        ]
        return datetime.datetime.fromtimestamp(nanoseconds / 1e9, datetime.UTC)
    except (OSError, ValueError, KeyError, TypeError):
        text = os.fspath(step_directory)
        seconds = step_directory.stat().mtime if "://" in text else os.stat(text).st_mtime
        return datetime.datetime.fromtimestamp(int(seconds), datetime.UTC)


def _metadata(step_directory: epath.Path) -> dict[str, Any]:
    """The step's metadata; empty where they are damaged, which the findings tell."""
    try:
        return step_metadata.read(step_directory)
    except (OSError, ValueError, KeyError, TypeError):
        return {}
