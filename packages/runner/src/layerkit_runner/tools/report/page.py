"""The page of a report, and what Python and a notebook get of it."""

from __future__ import annotations

import datetime
import html
import os
import shlex
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from etils import epath

from layerkit_runner.config.recorded import differing_names
from layerkit_runner.observers.base import TOTAL_WEIGHT
from layerkit_runner.observers.speed import PHASES
from layerkit_runner.tools.pages.page import render_page, write_page
from layerkit_runner.tools.report.curves import make_charts
from layerkit_runner.tools.report.record import JobRecord, plain_text, read_jobs

# Colors of the phases: steps are grey, so that what delays them stands out.
_COLORS = dict(zip(PHASES, ("soft", 4, 1, 5, 0, 3, 2, 6, "bad", 7), strict=True))
_MAX_STARTS, _MAX_ROWS, _MAX_CELL, _MAX_SAMPLES = 20, 200, 1000, 60
_LOSS_RATIO = 1.25  # of a held-out loss and the lowest one of a report, to be looked at


class Report:
    """The report of one or several runs, which a notebook shows.

    Attributes:
      html: The page, which loads nothing from elsewhere.
    """

    def __init__(self, jobs: Sequence[JobRecord], *, refresh_secs: int | None = None) -> None:
        """Make the page; a browser reloads it every `refresh_secs` seconds unless that is None."""
        self.html = _page(jobs, refresh_secs)

    def save(self, file: str | os.PathLike[str]) -> epath.Path:
        """Write the page to a local or remote file, and return its path."""
        return write_page(file, self.html)

    def _repr_html_(self) -> str:
        frame = 'style="width:100%;height:900px;border:0" sandbox="allow-scripts"'
        return f'<iframe title="report of runs" srcdoc="{html.escape(self.html)}" {frame}></iframe>'


def report(folders: Iterable[str | os.PathLike[str]] | str | os.PathLike[str]) -> Report:
    """Return the report of the runs in job folders; `save` writes it to a file.

    Args:
      folders: Local or remote job folders, or folders of sweeps; also a single one.

    Raises:
      UsageError: A folder holds no run.
    """
    if isinstance(folders, (str, os.PathLike)):
        folders = [folders]
    return Report(read_jobs(folders))


def _page(jobs: Sequence[JobRecord], refresh_secs: int | None) -> str:
    names = [job.name for job in jobs]
    bars = [bar for job in jobs for bar in _bars(job)]
    num_samples = max(_MAX_SAMPLES // len(jobs), 1)
    samples = [(*one, run) for run, job in enumerate(jobs) for one in job.samples[:num_samples]]
    events = [(run, event) for run, job in enumerate(jobs) for event in job.metrics.events]
    kinds = ("resume", "rollback")
    resumes = [[run, one["step"]] for run, one in events if one["event"] in kinds]
    facts = [_facts(job) for job in jobs]
    fields = [
        {"experiment": job.config.experiment, **job.config.fields, "git": fact["git"]}
        for job, fact in zip(jobs, facts, strict=True)
    ]
    return render_page(
        "report/page.html.jinja",
        title=f"Report of {', '.join(names[:4])}{' …' if len(names) > 4 else ''}",
        data={"charts": make_charts(jobs), "resumes": resumes},
        jobs=jobs,
        written=_time_text(time.time()),
        refresh=refresh_secs,
        rows=[summarize(job, jobs) for job in jobs],
        bars=bars,
        full=max((sum(part["value"] for part in bar["parts"]) for bar in bars), default=1.0),
        phases={
            n: color for n, color in _COLORS.items() if any(job.seconds.get(n) for job in jobs)
        },
        differences=_table(_differing(fields)),
        derived=_table(_differing([job.config.config for job in jobs])),
        max_rows=_MAX_ROWS,
        evaluations=_table([dict(_evaluations(job)) for job in jobs]),
        samples=sorted(samples, key=lambda one: (-one[0], one[1], one[-1])),
        facts=_table(facts),
    )


def summarize(job: JobRecord, jobs: Sequence[JobRecord]) -> dict[str, str]:
    """Return the texts that describe a run of a report of `jobs`, for a page or a terminal."""
    newest, info, left = job.newest, job.metrics.info, job.seconds_left
    rows = job.metrics.train[-20:]
    unit = "tokens" if any("tokens_per_sec" in row for row in rows) else "examples"
    speeds = [row[name] for row in rows if (name := f"{unit}_per_sec") in row]
    total, starts = sum(job.seconds.values()), len(job.starts)
    is_running = job.state == "running" and left is not None
    texts = {
        "state": f"running, {_span(left or 0)} left" if is_running else job.state,
        "to look at": "; ".join([*job.notes(), *_worse_losses(job, jobs)]),
        "step": f"{newest.get('step', 0):,} of {info['num_train_steps']:,}" if info else "",
        "last loss": f"{newest['loss']:.4g}" if "loss" in newest else "",
        "held-out loss": ", ".join(f"{n} {loss:.4g}" for n, loss in job.held_out.items()),
        "speed": f"{statistics.median(speeds):,.0f} {unit}/s" if speeds else "",
        "time": _span(total) + (f" in {starts} starts" if starts > 1 else "") if total else "",
        "time in steps": f"{job.seconds.get('steps', 0.0) / total:.0%}" if total else "",
        "last step at": _time_text(newest["time"]) if newest else "",
        "experiment": info.get("experiment", "").rpartition(".")[2],
    }
    return {name: text or "–" for name, text in texts.items()}


def _worse_losses(job: JobRecord, jobs: Sequence[JobRecord]) -> Iterator[str]:
    for dataset, loss in job.held_out.items():
        lowest = min(other.held_out.get(dataset, loss) for other in jobs)
        if loss > _LOSS_RATIO * lowest > 0:
            yield f"loss of {dataset} is {loss / lowest:.3g} times the lowest of these runs"


def _time_text(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M %Z")


def _span(seconds: float) -> str:
    return str(datetime.timedelta(seconds=round(seconds)))


def _bars(job: JobRecord) -> Iterator[dict[str, Any]]:
    """Yield a bar of each of the newest starts, with the seconds by phase."""
    for number, seconds in [*enumerate(job.starts, start=1)][-_MAX_STARTS:]:
        total = max(sum(seconds.values()), 1e-9)
        parts: list[dict[str, Any]] = []
        for name, color in _COLORS.items():
            if (value := seconds.get(name, 0.0)) > 0:
                text = f"{name.replace('_', ' ')} {value / total:.0%}, {_span(value)}"
                parts.append({"color": color, "value": value, "text": text})
        largest = sorted(parts, key=lambda part: -part["value"])[:4]
        start = f", start {number} of {len(job.starts)}" if len(job.starts) > 1 else ""
        yield {
            "label": job.name + start,
            "note": "; ".join([_span(total), *(part["text"] for part in largest)]),
            "parts": parts,
        }


def _table(sides: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Return the texts of all sides by name; a side without the name has a dash."""
    names = dict.fromkeys(name for side in sides for name in side)
    return {name: [_cell(side.get(name, "–")) for side in sides] for name in names}


def _cell(value: Any) -> str:
    text = plain_text(value)
    return text if len(text) <= _MAX_CELL else f"{text[:_MAX_CELL]}…"


def _differing(sides: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    names = {name for side in sides for name in differing_names(sides[0], side)}
    return [{name: value for name, value in side.items() if name in names} for side in sides]


def _evaluations(job: JobRecord) -> Iterator[tuple[str, str]]:
    """Yield the newest value of each metric, with its step."""
    for dataset, rows in job.metrics.evals.items():
        for name, value in rows[-1].items():
            if name not in ("step", "time", "dataset", TOTAL_WEIGHT):
                yield f"{dataset}: {name}", f"{value:.5g} at step {rows[-1]['step']:,}"


def _facts(job: JobRecord) -> dict[str, str]:
    """Return the environment, the command and the starts of a run."""
    info = job.metrics.info
    versions = {**info.get("environment", {})}
    host, git = versions.pop("host", "–"), versions.pop("git", "–")
    events = [
        f"{_time_text(event['time'])} {event['event']}: {event.get('reason', event.get('step'))}"
        for event in job.metrics.events[-2 * _MAX_STARTS :]
    ]
    return {
        "folder": job.folder,
        "command": shlex.join(["runner", *job.config.arguments, f"--job_log_dir={job.folder}"]),
        "devices": f"{info.get('num_devices', '–')} × {info.get('device_kind', '–')}",
        "parameters": f"{info['num_params']:,}" if "num_params" in info else "–",
        "host": host,
        "git": git,
        "versions": ", ".join(map(" ".join, versions.items())),
        "checkpoints": ", ".join(map(str, job.checkpoints[-8:])),
        "starts and ends": "\n".join(events),
    }
