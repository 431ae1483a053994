"""Reports of runs: sampling of curves, states, pages in a browser, and folders that hold no run."""

from __future__ import annotations

import html
import json
import os
import re
import socket
import time

import fsspec
import numpy as np
import pytest
from etils import epath
from fsspec.implementations.memory import MemoryFileSystem

from layerkit_runner.errors import UsageError
from layerkit_runner.observers import MetricsLog, RunInfo
from layerkit_runner.run import job_folder
from layerkit_runner.tools.report import command
from layerkit_runner.tools.report.curves import make_charts, sample
from layerkit_runner.tools.report.page import report, summarize
from layerkit_runner.tools.report.record import read_jobs


def write_run(
    folder, losses, *, every=1, num_steps=None, reason="finished", lr=1e-3, programs=(), **more
):
    """Write the files of a run by the real observer; `losses` are at every k-th step."""
    log = MetricsLog()
    num_steps = num_steps or every * len(losses)
    facts = {"experiment": "lm.Toy", "mode": "train", "num_params": 10, "start_step": 0}
    sizes = {"tokens_per_step": 64, "examples_per_step": 4}
    devices = {"num_devices": 1, "device_kind": "cpu"}
    rest = {"job_log_dir": epath.Path(folder), "num_train_steps": num_steps}
    rest["train_programs"] = programs
    log.start(RunInfo(**facts, **sizes, **devices, **rest, environment={"git": "abc-dirty"}))
    for step, loss in enumerate(losses, start=1):
        scalars = {"loss": loss, "learning/lr": lr, "learning/raw_grad_norm": 2 * loss}
        scalars |= {"tokens_per_sec": 5e4 + step % 7, "learning/is_valid_step": np.isfinite(loss)}
        scalars |= {"learning/skipped_steps": 0.0, "memory/host_rss_bytes": 1e9 + step}
        scalars |= {**more, **({f"{programs[0]}/loss": loss} if programs else {})}
        scalars = {name: value for name, value in scalars.items() if value is not None}
        log.train_metrics(step * every, scalars)
    log.eval_metrics(num_steps, "heldout", {"loss": 3.0, "accuracy": 0.25})
    if reason:
        log.end(reason)
    log.close()
    seconds = {"steps": 60.0, "input_wait": 30.0, "compile": 10.0, "lost": 0.0}
    runs = [dict(seconds, lost=5.0), seconds]
    (folder / "goodput.json").write_text(json.dumps({"seconds": seconds, "runs": runs}))
    fields = {"experiment": "lm.Toy", "overrides": {}, "arguments": ["--exp=lm.Toy"]}
    config = {"fields": {"RATE": lr, "DEPTH": 2}, "config": {"task.rate": lr}}
    (folder / "config.json").write_text(json.dumps({**fields, **config}))
    decoded = folder / "decode" / "prompts" / "step_00000010.jsonl"
    decoded.parent.mkdir(parents=True, exist_ok=True)
    decoded.write_text(json.dumps({"prompt": "Once", "continuation": "<b>upon</b>"}) + "\n")
    return folder


class MemoryStore(MemoryFileSystem):
    """Keeps `s3://bucket/…` in memory."""

    protocol = "s3"
    store: dict = {}
    pseudo_dirs = [""]

    @classmethod
    def _strip_protocol(cls, path):
        return MemoryFileSystem._strip_protocol(path.removeprefix("s3:/"))


@pytest.fixture
def bucket(monkeypatch):
    fsspec.register_implementation("s3", MemoryStore, clobber=True)
    monkeypatch.setattr("etils.epath.gpath._is_tf_installed", lambda: False)
    epath.backend.fsspec_backend._get_filesystem.cache_clear()
    yield epath.Path("s3://bucket/job")
    epath.backend.fsspec_backend._get_filesystem.cache_clear()


@pytest.mark.parametrize("seed", range(5))
def test_sample_keeps_lowest_highest_and_first_bad_step_of_each_bucket(seed):
    rng = np.random.default_rng(seed)
    num, buckets = 10_000, 100
    values = rng.normal(size=num)
    values[rng.integers(0, num, 20)] = rng.choice([np.nan, np.inf, -np.inf], 20)
    values[rng.integers(0, num, 5)] = 1e6
    is_bad = ~np.isfinite(values) | (rng.random(num) < 1e-3)
    kept = sample(values, is_bad, buckets)
    assert len(kept) <= 3 * buckets + 2
    assert (np.diff(kept) > 0).all()
    assert {0, num - 1} <= {*kept}
    for part in np.arange(num).reshape(buckets, -1):
        finite = part[np.isfinite(values[part])]
        bad = part[is_bad[part]]
        inside = {*kept} & {*part}
        assert {finite[values[finite].argmin()], finite[values[finite].argmax()]} <= inside
        assert {*bad[:1]} <= inside
    assert {*np.flatnonzero(values == 1e6)} <= {*kept}
    assert sample(values[:200], is_bad[:200], buckets).tolist() == [*range(200)]


@pytest.mark.slow
def test_page_of_ten_runs_of_100k_steps_is_below_500_kb(tmp_path):
    rng = np.random.default_rng(0)
    folders = [
        write_run(tmp_path / f"run{run}", 3 + rng.random(4000), every=25, mfu=0.5 + run)
        for run in range(10)
    ]
    file = report(folders).save(tmp_path / "report.html")
    assert 200_000 < os.path.getsize(file) < 500_000


def test_report_shows_what_differs_and_marks_spikes_and_nan_steps_in_browser(tmp_path, open_page):
    losses = np.linspace(5, 2, 3000)
    bad = losses.copy()
    bad[[100, 2000]] = 77.0, np.nan
    folders = [
        write_run(tmp_path / "base", losses),
        write_run(tmp_path / "high_rate", bad, lr=0.5, input_wait=0.4),
    ]
    file = tmp_path / "report.html"
    report(folders).save(file)
    for width, dark in ((1400, False), (400, False), (1400, True)):
        page = open_page(file, width=width, dark=dark)
    plots = "[...document.querySelectorAll('figure')].map((figure) => figure.plot)"
    titles = page.locator("figcaption").all_inner_texts()
    assert [title.split("\n")[0] for title in titles] == [
        *("Loss", "Learning rate", "Gradient norm", "Speed", "Waiting for input", "Memory"),
        "accuracy",
    ]
    assert page.evaluate(f"{plots}[0].data.some((line) => line.includes(77))")
    raw = json.loads(page.locator("#data").text_content())["charts"]["loss"]["curves"]
    assert [curve["bad"] for curve in raw if not curve["dashed"] and curve["faint"]] == [[], [2001]]
    text = page.locator("main").inner_text()
    assert re.search(r"RATE\s+0.001\s+0.5", text)
    assert "DEPTH" not in text
    assert "high_rate, start 2 of 2" in text
    assert "devices wait for input 33% of the step time" in text
    assert "Once<b>upon</b>" in text
    assert "runner --exp=lm.Toy" in text
    assert "abc-dirty" in text


def test_states_of_runs(tmp_path, monkeypatch):
    def state(name, *, host=None, **options):
        folder = write_run(tmp_path / name, [3.0, 2.0], **options)
        if host is not None:
            (folder / ".running").write_text(json.dumps({"host": host, "pid": os.getpid()}))
        return read_jobs([folder])[0].state

    here, stopped = socket.gethostname(), "stopped by a signal"
    assert state("finished") == "finished"
    assert state("stopped", reason=stopped, num_steps=9) == "stopped"
    assert state("failed", reason="OSError: disk full", num_steps=9) == "failed"
    # Another process may have the id of one that was killed. The killed one may be the second one,
    # or have ended within its last save.
    assert state("killed", reason="", num_steps=9, host=here) == "killed"
    assert state("killed_again", reason=stopped, num_steps=9, host=here) == "killed"
    assert state("saving", reason="", host=here) == "killed"
    for name in ("killed", "killed_again", "saving"):
        with job_folder.only_trainer(tmp_path / name):
            (job,) = read_jobs([tmp_path / name])
            assert (job.state, job.errors) == ("running", [])
    assert state("elsewhere", reason="", num_steps=9, host="another") == "running"
    assert state("without_locks", reason="", num_steps=9) == "running"
    log = state("earlier", reason="") and tmp_path / "earlier" / "metrics.jsonl"
    log.write_text(log.read_text().replace('"environment"', '"of_later_versions"'))
    assert read_jobs([tmp_path / "earlier"])[0].state == "finished"  # at its last step
    later = time.time() + 3600
    monkeypatch.setattr(time, "time", lambda: later)
    for name in ("elsewhere", "without_locks"):
        assert read_jobs([tmp_path / name])[0].state == "silent"


def test_record_without_phases_and_with_another_lock_is_read(tmp_path):
    folder = write_run(tmp_path / "run", [3.0, 2.0], reason="", num_steps=9)
    (folder / ".running").write_text("[1]")
    for goodput, share in (({"seconds": {"steps": 3.0}}, "100%"), ({}, "–")):
        (folder / "goodput.json").write_text(json.dumps(goodput))
        (job,) = read_jobs([folder])
        assert (job.state, summarize(job, [job])["time in steps"]) == ("running", share)


def test_newest_evaluation_counts_and_those_of_lost_work_do_not(tmp_path):
    times = {
        "metrics.jsonl": [("start", 0, 1), ("train", 100, 4), ("resume", 50, 6), ("train", 70, 8)],
        "metrics_eval.jsonl": [("lost", 100, 5), ("eval", 70, 7), ("kept", 50, 3)],
        "metrics_eval_once.jsonl": [("once", 50, 9), ("lost", 60, 2)],
    }
    for name, rows in times.items():
        lines = [
            {"event": text, "step": step, "time": moment}
            if text in ("start", "resume")
            else {"step": step, "time": moment, "dataset": "heldout", "loss": text, text: 1.0}
            for text, step, moment in rows
        ]
        (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    (job,) = read_jobs([tmp_path])
    rows = [(row["step"], row["loss"]) for row in job.metrics.evals["heldout"]]
    assert rows == [(50, "once"), (70, "train")]
    assert {"kept", "once"} <= job.metrics.evals["heldout"][0].keys()  # of other metrics


def test_sweep_with_a_trial_that_failed_before_its_first_step(tmp_path):
    trial = tmp_path / "trials" / "0000"
    write_run(tmp_path / "run", [3.0])
    trial.mkdir(parents=True)
    (trial / "config.json").write_bytes((tmp_path / "run" / "config.json").read_bytes())
    (trial / "output.txt").write_text("step 1\nrunner: no such \x1b[31mfile\n" + "Error" * 1000)
    (job,) = read_jobs([tmp_path])
    assert (job.name, job.state) == ("0000", "not started")
    assert job.errors == ["runner: no such \\x1b[31mfile", "Error" * 100]
    assert "No step was recorded." in report(tmp_path).html


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["a/run", "b/run"], ["a/run", "b/run"]),
        (["sweep", "sweep/trials/0", "sweep/"], ["sweep", "sweep/trials/0"]),
        (["<b>\u202e\n", "\udcff"], ["<b>\\u202e\\n", "\\udcff"]),
    ],
)
def test_names_tell_runs_apart(tmp_path, names, expected):
    for name in dict.fromkeys(name.rstrip("/") for name in names):
        write_run(tmp_path / name, [3.0])
    shown = report([f"{tmp_path}/{name}" for name in names])
    jobs = read_jobs([f"{tmp_path}/{name}" for name in names])
    assert [job.name for job in jobs] == expected
    shown.save(tmp_path / "report.html")
    assert all(f"<b>{html.escape(name)}</b>" in shown.html for name in expected)


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([], []),
        (["", '{"prompt": "Onc'], []),
        ([{"prompt": [{"role": "user"}], "continuation": 5}], [('[{"role": "user"}]', "5")]),
        ([{"image": [0] * 400}], [("", json.dumps({"image": [0] * 400})[:600])]),
    ],
)
def test_samples_of_other_records_and_half_written_files(tmp_path, lines, expected):
    folder = write_run(tmp_path / "run", [3.0])
    file = folder / "decode" / "prompts" / "step_00000010.jsonl"
    file.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines))
    assert [sample[2:] for sample in read_jobs([folder])[0].samples] == expected


def test_charts_have_all_runs_programs_and_data_sets(tmp_path):
    folders = [
        write_run(tmp_path / "text", [-1.0, 1.7976e308, np.nan, 2.0], programs=("heldout", "code")),
        write_run(tmp_path / "images", [3.0, 2.0], tokens_per_sec=None, examples_per_sec=7.0),
    ]
    charts = make_charts(read_jobs(folders))
    lines = [(curve["label"], curve["dashed"], curve["y"]) for curve in charts["loss"]["curves"]]
    assert lines == [
        ("text · heldout", False, [-1.0, None, None, 2.0]),
        ("text · heldout", True, [3.0]),
        ("images · heldout", True, [3.0]),
    ]
    assert not charts["loss"]["log"]  # which has no place for a negative value
    speeds = {charts[name]["unit"]: charts[name]["curves"] for name in charts if "_per_" in name}
    labels = {unit: [curve["label"] for curve in curves] for unit, curves in speeds.items()}
    assert labels == {"tokens/s": ["text"], "examples/s": ["images"]}


def test_status_prints_state_and_errors_and_fails_for_a_failed_run(tmp_path, capsys):
    write_run(tmp_path / "a", [3.0, 2.0])
    losses = np.linspace(3, 9, 20)
    write_run(tmp_path / "b", losses, reason="ValueError: no such token", num_steps=90)
    assert command.run_status([str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    output = capsys.readouterr().out
    for text in (
        "a: finished",
        "b: failed",
        "20 of 90",
        "mean loss rose from 3 to 9",
        "no such token",
    ):
        assert text in output
    assert "\x1b" not in output
    assert command.run_status([str(tmp_path / "a")]) == 0


def test_remote_folder_is_read_and_written(bucket, tmp_path):
    local = write_run(tmp_path / "run", [3.0, 2.0], reason="", num_steps=9)
    for file in local.rglob("*.json*"):
        path = bucket / file.relative_to(local).as_posix()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(file.read_text())
    (job,) = read_jobs([bucket])
    assert (job.name, job.state, job.newest["loss"]) == ("job", "running", 2.0)
    assert [job.name for job in read_jobs([bucket, local])] == ["s3:/bucket/job", str(local)[1:]]
    command.run_report([str(bucket), f"--html={bucket}/report.html"])
    assert "<title>Report of job</title>" in (bucket / "report.html").read_text()


def test_folder_without_a_run_is_an_error_that_names_a_near_one(tmp_path, raises):
    write_run(tmp_path / "quickstart", [3.0])
    with raises(UsageError, field="DIR", value=str(tmp_path / "quickstrat")) as error:
        read_jobs([tmp_path / "quickstrat"])
    assert error.value.choices == (str(tmp_path / "quickstart"),)


def test_notebook_shows_the_page_in_a_frame(tmp_path):
    shown = report([write_run(tmp_path / "run", [3.0, 2.0])])
    frame = shown._repr_html_()
    (source,) = re.findall(r'srcdoc="([^"]*)"', frame)
    assert html.unescape(source) == shown.html
