"""metrics.jsonl: the record of a run that needs nothing but a JSON reader.

One object per line, in the order things happened:

    {"event": "start", "step": 0, "time": …, "experiment": …, "num_params": …, …}
    {"step": 1, "time": …, "loss": …, "tokens_per_sec": …, "mfu": …, …}
    {"step": 100, "time": …, "dataset": "held_out", "loss": …, …}
    {"event": "resume", "step": 500, "time": …, …}

`time` is Unix time in seconds. A training run that finds an earlier record says `resume` with the
step it continues from, also when that is step 0. Lines of later steps that stand before it come
from work that was lost; they stay in the file, and `read_metrics` leaves them out.

Only a training run writes metrics.jsonl. Other modes may watch the same folder at the same time, so
they write a file of their own, metrics_<mode>.jsonl.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Mapping
from typing import Any

from etils import epath

from layerkit_runner.observers import json_lines
from layerkit_runner.observers.base import Observer, RunInfo

_RESERVED = ("event", "step", "time", "dataset")
_NON_FINITE = ("NaN", "Infinity", "-Infinity")

Record = dict[str, Any]


class MetricsLog(Observer):
    """Writes every scalar of a run as JSON lines into its folder; see the module's docstring."""

    in_background = False

    def __init__(self, *, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lines: json_lines.LineWriter | None = None

    def start(self, info: RunInfo) -> None:
        if info.job_log_dir is None:
            return
        self._lines = json_lines.open_lines(metrics_path(info.job_log_dir, mode=info.mode))
        resumes = self._lines.resumed and info.mode == "train"
        facts = {
            field.name: getattr(info, field.name)
            for field in dataclasses.fields(info)
            if field.name not in ("job_log_dir", "start_step")
        }
        self._write({"event": "resume" if resumes else "start", "step": info.start_step}, facts)

    def train_metrics(self, step: int, scalars: Mapping[str, float]) -> None:
        self._write({"step": step}, scalars)

    def eval_metrics(self, step: int, dataset: str, scalars: Mapping[str, float]) -> None:
        self._write({"step": step, "dataset": dataset}, scalars)

    def flush(self) -> None:
        if self._lines is not None:
            self._lines.flush()

    def close(self) -> None:
        lines, self._lines = self._lines, None
        if lines is not None:
            lines.close()

    def _write(self, head: Record, scalars: Mapping[str, Any]) -> None:
        if self._lines is None:
            return
        for name in scalars:
            if name in _RESERVED:
                raise ValueError(
                    f"a scalar is named {name!r}, which metrics.jsonl keeps for itself (as it does "
                    f"{', '.join(map(repr, _RESERVED))}): give it another name"
                )
        head["time"] = round(self._clock(), 3)
        self._lines.write(json_lines.encode({**head, **scalars}))


def metrics_path(job_log_dir: epath.PathLike, *, mode: str = "train") -> epath.Path:
    """Where a run of this mode keeps its record."""
    name = "metrics.jsonl" if mode == "train" else f"metrics_{mode}.jsonl"
    return epath.Path(job_log_dir) / name


@dataclasses.dataclass(frozen=True)
class Metrics:
    """The series of one record, lost work left out.

    Attributes:
      info: the newest `start` or `resume` line: experiment, num_params, tokens_per_step, …
      train: one record per logged step, in order: step, time, loss, …
      evals: the same for each data set that was evaluated, by its name.
    """

    info: Record
    train: list[Record]
    evals: dict[str, list[Record]]


def read_metrics(path: epath.PathLike) -> Metrics:
    """Reads metrics.jsonl (or a job folder that holds one) into the series a reader wants.

    What was logged after the step that a later run resumed from is left out. Of two records of one
    step (and data set) the later one counts. A cut-off last line is the mark of a killed or still
    writing process, and is passed over.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: a line is not JSON; the file and the line's number are named.
    """
    path = epath.Path(path)
    if path.is_dir():
        path = metrics_path(path)
    info: Record = {}
    train: dict[int, Record] = {}
    evals: dict[str, dict[int, Record]] = {}
    for record in _records(path):
        step = record["step"]
        if "event" in record:
            info = record
            if record["event"] == "resume":
                for series in (train, *evals.values()):
                    for lost in [later for later in series if later > step]:
                        del series[lost]
        elif "dataset" in record:
            evals.setdefault(record["dataset"], {})[step] = record
        else:
            train[step] = record
    return Metrics(
        info=info,
        train=_by_step(train),
        evals={name: _by_step(series) for name, series in evals.items() if series},
    )


def _by_step(series: dict[int, Record]) -> list[Record]:
    return [series[step] for step in sorted(series)]


def _records(path: epath.Path) -> list[Record]:
    *lines, cut_off = path.read_text().split("\n")
    del cut_off  # empty, unless the last line has no end yet
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(parse_record(line))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number} is not JSON: {line[:80]!r}") from error
    return records


def parse_record(line: str) -> Record:
    """One line as it was meant: numbers that JSON has none for are numbers again."""
    return {key: _number(value) for key, value in json.loads(line).items()}


def _number(value: Any) -> Any:
    return float(value) if value in _NON_FINITE else value
