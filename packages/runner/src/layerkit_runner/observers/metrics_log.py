"""metrics.jsonl, the record of a run as JSON lines in the order of events.

    {"event": "start", "step": 0, "time": …, "experiment": …, "num_params": …, …}
    {"step": 1, "time": …, "loss": …, "tokens_per_sec": …, "mfu": …, …}
    {"step": 100, "time": …, "dataset": "held_out", "loss": …, …}
    {"event": "resume", "step": 500, "time": …, …}
    {"event": "rollback", "step": 500, "time": …, "last_step": 557, "loss": …, "grad_norm": …}
    {"event": "end", "time": …, "reason": "finished"}

`time` is Unix time in seconds. After `resume` and `rollback`, earlier lines of later steps come
from lost work, which `read_metrics` omits. A rollback leaves out the data of the steps after
`step`, up to `last_step`. Other modes than training write metrics_<mode>.jsonl.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from etils import epath

from layerkit.errors import ConfigError
from layerkit_runner.errors import UsageError
from layerkit_runner.files.atomic_write import atomic_write, is_remote, naming_path, open_append
from layerkit_runner.observers.base import Background, Observer, RunInfo

_RESERVED = ("event", "step", "time", "dataset")
_NON_FINITE = ("NaN", "Infinity", "-Infinity")
_SECONDS_BETWEEN_REWRITES = 30.0

Record = dict[str, Any]


class MetricsLog(Observer):
    """An observer that writes every scalar of a run as JSON lines into its folder."""

    in_background = False

    def __init__(self, *, clock: Callable[[], float] = time.time) -> None:
        """Start without a file; `clock` returns Unix time in seconds."""
        self._clock = clock
        self._lines: LocalLines | StoredLines | None = None

    def start(self, info: RunInfo) -> None:
        """Open the file, and write the facts about the run."""
        if info.job_log_dir is None:
            return
        self._lines = open_lines(metrics_path(info.job_log_dir, mode=info.mode))
        resumes = self._lines.resumed and info.mode == "train"
        facts = {
            field.name: getattr(info, field.name)
            for field in dataclasses.fields(info)
            if field.name not in ("job_log_dir", "start_step", "config")
        }
        self._write({"event": "resume" if resumes else "start", "step": info.start_step}, facts)

    def train_metrics(self, step: int, scalars: Mapping[str, float]) -> None:
        """Write one line."""
        self._write({"step": step}, scalars)

    def eval_metrics(self, step: int, dataset: str, scalars: Mapping[str, float]) -> None:
        """Write one line with the name of the data set."""
        self._write({"step": step, "dataset": dataset}, scalars)

    def rollback(self, step: int, facts: Mapping[str, float]) -> None:
        """Write one line."""
        self._write({"event": "rollback", "step": step}, facts)

    def end(self, reason: str) -> None:
        """Write the reason as the last line of a run."""
        self._write({"event": "end"}, {"reason": reason})

    def flush(self) -> None:
        """Start writing all earlier lines to a remote store."""
        if self._lines is not None:
            self._lines.flush()

    def close(self) -> None:
        """Write the remaining lines, and close the file."""
        lines, self._lines = self._lines, None
        if lines is not None:
            lines.close()

    def _write(self, head: Record, scalars: Mapping[str, Any]) -> None:
        if self._lines is None:
            return
        check_scalar_names(scalars)
        head["time"] = round(self._clock(), 3)
        self._lines.write(encode({**head, **scalars}))


def check_scalar_names(names: Iterable[str], *, others: Sequence[str] = ()) -> None:
    """Raise ConfigError if a scalar has the name of a key of records, or one of `others`."""
    reserved = (*_RESERVED, *others)
    for name in names:
        if name in reserved:
            expected = f"a name other than {', '.join(reserved)}"
            raise ConfigError(
                "reserved name",
                owner="metrics.jsonl",
                field="scalar",
                value=name,
                expected=expected,
            )


def metrics_path(job_log_dir: epath.PathLike, *, mode: str = "train") -> epath.Path:
    """Return the path of the record of a run in this mode."""
    name = "metrics.jsonl" if mode == "train" else f"metrics_{mode}.jsonl"
    return epath.Path(job_log_dir) / name


def encode(record: Mapping[str, Any]) -> str:
    """Return a record as one line of valid JSON, without a line end.

    NaN and infinity become the strings "NaN", "Infinity" and "-Infinity", which `float` parses.
    """
    return json.dumps({key: _plain(value) for key, value in record.items()}, allow_nan=False)


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    number = float(value)
    return number if math.isfinite(number) else json.dumps(number)


def open_lines(path: epath.PathLike) -> LocalLines | StoredLines:
    """Create the folder of a file, and return the writer for its kind of store."""
    path = epath.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    return StoredLines(path) if is_remote(path) else LocalLines(path)


class LocalLines:
    """A writer that appends lines to a local file; `resumed` if the file had lines before."""

    def __init__(self, path: epath.Path) -> None:
        """Open the file, and remove an incomplete last line, which a killed process leaves."""
        self._file = open_append(path)
        self._file.seek(0)
        whole = _whole_lines(self._file.read())
        self.resumed = bool(whole)
        self._file.truncate(len(whole))

    def write(self, line: str) -> None:
        """Append one line, given without a line end."""
        with naming_path(self._file.name):
            self._file.write(line.encode() + b"\n")
            self._file.flush()

    def flush(self) -> None:
        """Do nothing, since no line is buffered."""

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class StoredLines:
    """A writer of lines to a store without append, such as `gs://…`, which rewrites the file.

    The rewrite runs in the background, every `interval` seconds and on `flush`. A later call raises
    its error. `resumed` is True if the file had lines before.
    """

    def __init__(self, path: epath.Path, *, interval: float = _SECONDS_BETWEEN_REWRITES) -> None:
        """Read the lines of the file, if it exists."""
        self._path = path
        self._interval = interval
        self._content = bytearray(_whole_lines(path.read_bytes() if path.exists() else b""))
        self.resumed = bool(self._content)
        self._background = Background()
        self._num_submitted = len(self._content)  # bytes in the newest rewrite
        self._next_rewrite = 0.0

    def write(self, line: str) -> None:
        """Append one line, given without a line end."""
        self._content += line.encode() + b"\n"
        if not self._background.num_pending and time.monotonic() >= self._next_rewrite:
            self.flush()

    def flush(self) -> None:
        """Start a rewrite, without waiting."""
        if self._num_submitted < len(self._content):
            self._background.submit(atomic_write, self._path, bytes(self._content))
            self._num_submitted = len(self._content)
            self._next_rewrite = time.monotonic() + self._interval

    def close(self) -> None:
        """Write the remaining lines, and wait."""
        try:
            self.flush()
        finally:
            self._background.close()


def _whole_lines(content: bytes) -> bytes:
    return content[: content.rfind(b"\n") + 1]


@dataclasses.dataclass(frozen=True)
class Metrics:
    """The series of a metrics file, without lost work.

    `events` are the lines with an event, in order, and `info` is the newest `start` or
    `resume`. Each series has a record per step, in order.
    """

    info: Record
    train: list[Record]
    evals: dict[str, list[Record]]
    events: list[Record]


def read_metrics(path: epath.PathLike) -> Metrics:
    """Read the series of metrics.jsonl, given by its path or by its job folder.

    Records of lost work, and an incomplete last line, are omitted. Of two training records of one
    step, the later one counts. Evaluation records of one step and data set become one record, with
    the later value of each metric.

    Raises:
      FileNotFoundError: The file does not exist.
      ConfigError: A line is no JSON object.
    """
    path = epath.Path(path)
    if path.is_dir():
        path = metrics_path(path)
    info: Record = {}
    events: list[Record] = []
    train: dict[int, Record] = {}
    evals: dict[str, dict[int, Record]] = {}
    *lines, _ = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        try:
            record: Record = {
                key: float(value) if value in _NON_FINITE else value
                for key, value in json.loads(line).items()
            }
        except (ValueError, AttributeError) as error:
            owner, text = f"{path}, line {number}", line.decode(errors="replace")
            raise ConfigError(owner=owner, value=text, expected="a JSON object") from error
        step = record.get("step", 0)
        if "event" in record:
            events.append(record)
            info = record if record["event"] in ("start", "resume") else info
            if record["event"] in ("resume", "rollback"):
                for series in (train, *evals.values()):
                    for lost in [later for later in series if later > step]:
                        del series[lost]
        elif "dataset" in record:
            series = evals.setdefault(record["dataset"], {})
            series[step] = {**series.get(step, {}), **record}
        else:
            train[step] = record
    return Metrics(
        info=info,
        train=_sort_by_step(train),
        evals={name: _sort_by_step(series) for name, series in evals.items() if series},
        events=events,
    )


def metric_series(evals: Mapping[str, Sequence[Record]], metric: str) -> list[tuple[int, float]]:
    """Return the values of a metric, given as `DATASET/NAME`, by evaluated step.

    Raises:
      UsageError: The data set was evaluated without this metric.
    """
    dataset = max((name for name in evals if metric.startswith(f"{name}/")), key=len, default="")
    records, name = evals.get(dataset, []), metric.removeprefix(f"{dataset}/")
    choices = {f"{dataset}/{key}": 0 for one in records for key in one if key not in _RESERVED}
    if records and metric not in choices:
        raise UsageError("unknown metric", field="metric", value=metric, choices=choices)
    return [(record["step"], record[name]) for record in records if name in record]


def _sort_by_step(series: dict[int, Record]) -> list[Record]:
    return [series[step] for step in sorted(series)]


def smooth(values: Sequence[float], *, half_width: int) -> list[float]:
    """Return the means over a window of up to `half_width` values on either side of each value.

    The window is centered and shrinks at the start. At the end only its right side shrinks.

    >>> smooth([9.0, 6.0, 3.0, 0.0], half_width=1)
    [9.0, 6.0, 3.0, 1.5]
    """
    sums = [0.0, *itertools.accumulate(values)]
    smoothed = []
    for i in range(len(values)):
        low = max(i - half_width, 0)
        high = min(i + half_width, 2 * i, len(values) - 1)
        smoothed.append((sums[high + 1] - sums[low]) / (high + 1 - low))
    return smoothed
