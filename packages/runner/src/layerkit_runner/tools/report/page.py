"""The page of a report, and what Python and a notebook get of it."""

from __future__ import annotations

import datetime
import html
import json
import os
import shlex
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from etils import epath

from layerkit_runner.config.recorded import differing_names
from layerkit_runner.observers.base import TOTAL_WEIGHT
from layerkit_runner.tools.pages.page import render_page, write_page
from layerkit_runner.tools.report.curves import make_charts
from layerkit_runner.tools.report.record import JobRecord, read_jobs

# Colors of the phases: steps are green, and waiting for input is orange.
_COLORS: dict[str, int | str] = {
    "steps": 2,
    "input_wait": 1,
    "compile": 4,
    "save": 5,
    "eval": 0,
    "decode": 3,
    "profile": "soft",
    "start": 6,
    "lost": "bad",
    "other": 7,
}
_MAX_STARTS, _MAX_ROWS, _MAX_CELL, _MAX_SAMPLES = 20, 200, 1000, 60


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


def report(folders: Iterable[str | os.PathLike[str]]) -> Report:
    """Return the report of the runs in job folders; `save` writes it to a file.

    Args:
      folders: Local or remote job folders, or folders of sweeps.

    Raises:
      UsageError: A folder holds no run.
    """
    return Report(read_jobs(folders))


def _page(jobs: Sequence[JobRecord], refresh_secs: int | None) -> str:
    names = [job.name for job in jobs]
    bars = [bar for job in jobs for bar in _bars(job)]
    num_samples = max(_MAX_SAMPLES // len(jobs), 1)
    samples = [(*one, run) for run, job in enumerate(jobs) for one in job.samples[:num_samples]]
    configs = [job.config for job in jobs]
    fields = [{} if c is None else {"experiment": c.experiment, **c.fields} for c in configs]
    return render_page(
        "report/page.html.jinja",
        title=f"Report of {', '.join(names[:4])}{' …' if len(names) > 4 else ''}",
        data={"charts": make_charts(jobs)},
        jobs=jobs,
        written=_time_text(time.time()),
        refresh=refresh_secs,
        rows=[summarize(job) for job in jobs],
        bars=bars,
        full=max((sum(part["value"] for part in bar["parts"]) for bar in bars), default=1.0),
        phases=_COLORS,
        differences=_table(_differing(fields)),
        derived=_table(_differing([{} if c is None else c.config for c in configs])),
        max_rows=_MAX_ROWS,
        evaluations=_table([dict(_evaluations(job)) for job in jobs]),
        samples=sorted(samples, key=lambda one: (-one[0], one[1], one[-1])),
        facts=_table([_facts(job) for job in jobs]),
    )


def summarize(job: JobRecord) -> dict[str, str]:
    """Return the texts that describe the state of a run, for a page or a terminal."""
    newest, info, left = job.newest, job.metrics.info, job.seconds_left
    held_out = [rows[-1]["loss"] for rows in job.metrics.evals.values() if "loss" in rows[-1]]
    unit = "tokens" if "tokens_per_sec" in newest else "examples"
    speeds = [r[name] for r in job.metrics.train[-20:] if (name := f"{unit}_per_sec") in r]
    seconds = job.goodput.get("seconds", {"steps": 0.0})
    is_running = job.state == "running" and left is not None
    texts = {
        "experiment": info.get("experiment", "").rpartition(".")[2],
        "state": f"running, {_span(left or 0)} left" if is_running else job.state,
        "step": f"{newest.get('step', 0):,} of {info.get('num_train_steps', 0):,}",
        "loss": f"{newest['loss']:.4g}" if "loss" in newest else "",
        "held out": ", ".join(f"{loss:.4g}" for loss in held_out),
        "speed": f"{statistics.median(speeds):,.0f} {unit}/s" if speeds else "",
        "goodput": f"{seconds['steps'] / max(sum(seconds.values()), 1e-9):.0%}",
        "to look at": "; ".join(job.notes()),
        "last step at": _time_text(newest["time"]) if newest else "",
    }
    return {name: text or "–" for name, text in texts.items()}


def _time_text(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M %Z")


def _span(seconds: float) -> str:
    return str(datetime.timedelta(seconds=round(seconds)))


def _bars(job: JobRecord) -> Iterator[dict[str, Any]]:
    """Yield a bar of each of the newest starts, with the seconds by phase."""
    runs = job.goodput.get("runs") or [s for s in [job.goodput.get("seconds")] if s]
    for number, seconds in [*enumerate(runs, start=1)][-_MAX_STARTS:]:
        total = max(sum(seconds.values()), 1e-9)
        spent = {n: seconds[n] for n in _COLORS if seconds.get(n, 0.0) > 0}
        texts = {n: f"{n.replace('_', ' ')} {value / total:.0%}" for n, value in spent.items()}
        yield {
            "label": job.name + (f", start {number} of {len(runs)}" if len(runs) > 1 else ""),
            "note": ", ".join([_span(total), *list(texts.values())[:2]]),
            "parts": [
                {"color": _COLORS[n], "value": v, "text": f"{texts[n]}, {_span(v)}"}
                for n, v in spent.items()
            ],
        }


def _table(sides: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Return the texts of all sides by name; a side without the name has a dash."""

    def cell(value: Any) -> str:
        text = value if isinstance(value, str) else json.dumps(value)
        return text if len(text) <= _MAX_CELL else f"{text[:_MAX_CELL]}…"

    names = dict.fromkeys(name for side in sides for name in side)
    return {name: [cell(side.get(name, "–")) for side in sides] for name in names}


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
    info, words = job.metrics.info, [] if job.config is None else job.config.arguments
    versions = {**info.get("environment", {})}
    places = {name: versions.pop(name) for name in ("host", "git") if name in versions}
    events = [
        f"{_time_text(event['time'])} {event['event']}: {event.get('reason', event.get('step'))}"
        for event in job.metrics.events[-2 * _MAX_STARTS :]
    ]
    return {
        "folder": job.folder,
        "command": shlex.join(["runner", *words, f"--job_log_dir={job.folder}"]),
        "devices": f"{info.get('num_devices', '–')} × {info.get('device_kind', '–')}",
        "parameters": f"{info['num_params']:,}" if "num_params" in info else "–",
        **places,
        "versions": ", ".join(map(" ".join, versions.items())),
        "checkpoints": ", ".join(map(str, job.checkpoints[-8:])),
        "starts and ends": "\n".join(events),
    }
