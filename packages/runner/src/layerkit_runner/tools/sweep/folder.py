"""The folder of a sweep, and how processes that share it keep out of each other's way.

    DIR/study.json       what is searched; the folder belongs to that
    DIR/study.db         Optuna's memory, unless --study_storage names another
    DIR/study.lock       held by a process while it decides which trial it takes
    DIR/trials/0007/     the job folder of a trial
      trial.lock         held by the sweep's process as long as the trial is its own
      process.lock       held by the trial's process as long as it lives
      output.txt         what that process printed
    DIR/sweep.json, DIR/sweep.png   the result so far

Locks (`file_locks`) end with the process that holds them, however it ends, so a trial that was
under way and whose lock is free has lost its process, and whoever comes next takes it up.
"""

from __future__ import annotations

import contextlib
import json
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from layerkit_runner.config.overrides import Override
from layerkit_runner.errors import UsageError
from layerkit_runner.files.atomic_write import atomic_write
from layerkit_runner.files.bounded_documents import DocumentError, parse_json, read_text
from layerkit_runner.files.locks import lock, try_lock
from layerkit_runner.tools.sweep.search_space import Choices, Parameter
from layerkit_runner.tools.sweep.study_file import StudyFile

RECORD = "study.json"
_DAMAGED = "Copy it from a backup, or delete it: the next command of the study writes it anew."
"""What is searched; a folder that holds it is a sweep's."""


class SweepFolder:
    """Paths and locks of one sweep; makes nothing before it is asked to.

    Raises:
      UsageError: the folder is on a store, which knows no locks, or holds a training run.
    """

    def __init__(self, given: str) -> None:
        if "://" in given:
            raise UsageError(
                f"--job_log_dir={given}: a sweep needs a folder of a file system, since its"
                " processes find each other by locks."
            )
        self.given = given
        self.path = Path(given).expanduser().absolute()
        for name in ("config.json", "checkpoints"):
            if (self.path / name).exists():
                raise UsageError(
                    f"--job_log_dir={given} holds a run ({name}); a sweep needs a folder of its"
                    " own."
                )

    def trial(self, number: int) -> Path:
        """The job folder of a trial."""
        return self.path / "trials" / f"{number:04d}"

    def shown(self, number: int) -> str:
        """The same, as the folder of the sweep was given."""
        return f"{self.given.rstrip('/')}/trials/{number:04d}"

    @contextlib.contextmanager
    def deciding(self) -> Iterator[None]:
        """Alone among the processes of the sweep."""
        with lock(self.path / "study.lock"):
            yield

    def try_to_own(self, number: int) -> IO[bytes] | None:
        """The lock of a trial, to be closed in the end; None if another process holds it."""
        return try_lock(self.trial(number) / "trial.lock")

    def recorded(self) -> dict[str, Any] | None:
        """Return what is searched here; None in a new folder.

        Raises:
          UsageError: The record is damaged.
        """
        path = self.path / RECORD
        if not path.exists():
            return None
        try:
            found = parse_json(read_text(path))
        except (OSError, DocumentError) as error:
            raise UsageError(f"{path} is damaged: {error}. {_DAMAGED}") from error
        if not isinstance(found, dict):
            raise UsageError(f"{path} is damaged: expected an object. {_DAMAGED}")
        return found

    def record(self, found: Mapping[str, Any]) -> None:
        """Writes what is searched here."""
        atomic_write(self.path / RECORD, json.dumps(found, indent=2) + "\n")

    def forget_metric(self) -> None:
        """Lets the next command name another metric, since nothing was measured by this one."""
        with self.deciding():
            self.record({**(self.recorded() or {}), "metric": None})


def description(
    study: StudyFile, *, experiment: str, fixed: Sequence[Override], storage: str | None
) -> dict[str, Any]:
    """What makes two sweeps the same one, for `study.json`.

    The number of trials, the sampler and the pruner may change while it runs; what the numbers mean
    may not.
    """
    return {
        "experiment": experiment,
        "metric": study.metric,
        "direction": study.direction,
        "storage": _without_password(storage),
        "overrides": {override.path: override.text for override in fixed},
        "space": {path: _described(parameter) for path, parameter in study.space.items()},
    }


def check_same_sweep(folder: SweepFolder, ours: Mapping[str, Any]) -> None:
    """Refuses a folder that holds another sweep.

    Raises:
      UsageError: lists what differs.
    """
    theirs = folder.recorded()
    if theirs is None:
        return
    differences = []
    for key, value in ours.items():
        before = theirs.get(key)
        if isinstance(value, dict) and isinstance(before, dict):
            for path in dict.fromkeys([*before, *value]):
                if before.get(path) != value.get(path):
                    there, here = _shown(before.get(path)), _shown(value.get(path))
                    differences.append(f"\n  {key}.{path}: {there} there, {here} here")
        elif before != value and not (key == "metric" and before is None):
            differences.append(f"\n  {key}: {_shown(before)} there, {_shown(value)} here")
    if differences:
        raise UsageError(
            f"--job_log_dir={folder.given} holds another sweep; give each a folder of its own."
            + "".join(differences)
        )


def _shown(value: Any) -> str:
    return "none" if value is None else json.dumps(value)


def _described(parameter: Parameter) -> dict[str, Any]:
    if isinstance(parameter, Choices):
        return {"choices": list(parameter.values)}
    low, high, log, step = parameter.low, parameter.high, parameter.log, parameter.step
    return {"low": low, "high": high, "log": log, "step": step}


def _without_password(storage: str | None) -> str | None:
    if storage is None or "://" not in storage:
        return storage
    parts = urllib.parse.urlsplit(storage)
    if parts.password is None:
        return storage
    network = parts.netloc.replace(f":{parts.password}@", ":***@")
    return urllib.parse.urlunsplit(parts._replace(netloc=network))
