"""Lists the steps in a folder of checkpoints, and watches for new ones. Reads no array."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath

from layerkit_runner.checkpointing import documents, folders, formats, integrity
from layerkit_runner.checkpointing.policy import SavedStep

_ORBAX_METADATA = "_CHECKPOINT_METADATA"


@dataclasses.dataclass(frozen=True)
class StepSummary:
    """A committed step.

    Attributes:
      step: The training step.
      time: Time of the save, in UTC.
      num_bytes: Size of all files.
      state_format: Format of the stored state.
      damage: Findings that make the step unusable.
      metrics: Recorded evaluation of this step, by `data set/metric`.
      reasons: Rules of the retention policy that keep the step. If empty, the next save deletes it.
        None if the checkpoint records no policy.
    """

    step: int
    time: datetime.datetime
    num_bytes: int
    state_format: formats.StateFormat
    damage: Sequence[integrity.Finding]
    metrics: Mapping[str, float]
    reasons: tuple[str, ...] | None


def summarize(directory: epath.Path, *, read_files: bool) -> list[StepSummary]:
    """Return the committed steps of a folder, in rising order.

    Args:
      directory: The folder of the checkpoints.
      read_files: True to verify the content of every file, False to compare sizes.

    Raises:
      NewerManifestError: A later version of this package wrote a step.
    """
    found = documents.read_evaluations(directory)
    check = integrity.verify if read_files else integrity.compare_sizes
    summaries, newest_policy = [], None
    for step in folders.committed_steps(directory):
        path = folders.step_folder(directory, step)
        newest_policy = documents.policy_of(_metadata(path))
        summaries.append(
            StepSummary(
                step=step,
                time=saved_at(path),
                num_bytes=sum(integrity.file_sizes(path).values()),
                state_format=formats.format_of(path / "state"),
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
    """Return the time of the commit of a step in UTC; without a record, that of its folder."""
    try:
        about = json.loads((step_directory / _ORBAX_METADATA).read_text())
        return datetime.datetime.fromtimestamp(about["commit_timestamp_nsecs"] / 1e9, datetime.UTC)
    except (OSError, ValueError, KeyError, TypeError):
        text = os.fspath(step_directory)
        seconds = step_directory.stat().mtime if "://" in text else os.stat(text).st_mtime
        return datetime.datetime.fromtimestamp(int(seconds), datetime.UTC)


def _metadata(step_directory: epath.Path) -> dict[str, Any]:
    """Return the metadata of a step; empty if they are damaged, which the findings report."""
    try:
        return documents.read(step_directory)
    except (OSError, ValueError, KeyError, TypeError):
        return {}


@dataclasses.dataclass(frozen=True)
class NewStep:
    """A new step in a folder of checkpoints.

    Attributes:
      step: The newest committed step.
      passed_over: Older steps that appeared since the last one that was returned.
    """

    step: int
    passed_over: tuple[int, ...] = ()


class CheckpointWatcher:
    """A reader of a folder of checkpoints that returns each newest step once.

    It reads no arrays, so the step may be damaged. The training job that owns the folder may delete
    steps, and save a step again.

    Args:
      directory: Folder of the checkpoints, which need not exist yet.
    """

    def __init__(self, directory: epath.Path) -> None:
        """Watch a folder of which no step was returned yet."""
        self._directory = directory
        self._returned: tuple[int, str | None] | None = None

    def poll_newest(self) -> NewStep | None:
        """Return the newest step if it is new or was saved again; None otherwise."""
        steps = folders.committed_steps(self._directory)
        if not steps:
            return None
        newest = steps[-1]
        digest = integrity.step_digest(folders.step_folder(self._directory, newest))
        if (newest, digest) == self._returned:
            return None
        before = -1 if self._returned is None else self._returned[0]
        self._returned = (newest, digest)
        return NewStep(newest, tuple(step for step in steps[:-1] if step > before))
