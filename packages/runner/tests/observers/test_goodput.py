from __future__ import annotations

import json

import pytest
from etils import epath

from layerkit_runner.observers import Goodput, GoodputLog


def counted(goodput):
    return {name: value for name, value in goodput.seconds().items() if value}


def test_phases_add_up_to_the_elapsed_time(clock):
    goodput = Goodput(clock=clock)
    clock.now += 2
    with goodput.phase("compile"):
        clock.now += 3
    with goodput.phase("steps"):
        clock.now += 10
        goodput.moved("input_wait", 1.5)
        with goodput.phase("save"):
            clock.now += 4
        with goodput.phase("eval"):
            clock.now += 5
            with goodput.phase("profile"):
                clock.now += 0.25
    goodput.outermost("other")
    clock.now += 1
    interrupted = {"steps": 8.5, "input_wait": 1.5, "save": 4, "eval": 5, "profile": 0.25}
    assert counted(goodput) == {"start": 2, "compile": 3, **interrupted, "other": 1}
    assert sum(goodput.seconds().values()) == clock.now - 1000


def test_phase_ends_if_its_block_raises(clock):
    goodput = Goodput(clock=clock)

    def save():
        with goodput.phase("save"):
            clock.now += 2
            raise OSError("full")

    with pytest.raises(OSError, match="full"):
        save()
    clock.now += 1
    assert counted(goodput) == {"save": 2, "start": 1}


def read_runs(folder):
    return json.loads((folder / "goodput.json").read_text())["runs"]


def train(clock, folder, run_info, *, start_step, until, seconds_per_step=2.0, dies=False):
    """A run that needs 10 seconds to start; returns its goodput."""
    goodput = Goodput(clock=clock)
    log = GoodputLog(goodput, clock=clock)
    clock.now += 10
    log.start(run_info(job_log_dir=epath.Path(folder), start_step=start_step))
    with goodput.phase("steps"):
        for step in range(start_step + 1, until + 1):
            clock.now += seconds_per_step
            log.progress(step)
    if dies:
        log._background.close()  # writes the submitted records only
    else:
        log.close()
    return goodput


def test_repeated_steps_count_as_lost(clock, run_info, tmp_path):
    # Written every 30 seconds: after steps 15, 30 and 45. The save was at step 40.
    train(clock, tmp_path, run_info, start_step=0, until=50, dies=True)
    killed = json.loads((tmp_path / "goodput.json").read_text())
    assert (killed["step"], killed["num_steps"]) == (45, 45)
    clock.now += 300
    goodput = train(clock, tmp_path, run_info, start_step=40, until=60)
    # 45 steps of the first run were recorded, and 5 of them repeated.
    assert counted(goodput) == {"start": 20, "steps": 80 + 40, "lost": 10}
    assert (goodput.num_steps, goodput.num_lost_steps, goodput.num_runs) == (60, 5, 2)
    runs = [{name: value for name, value in run.items() if value} for run in read_runs(tmp_path)]
    assert runs == [{"start": 10, "steps": 80, "lost": 10}, {"start": 10, "steps": 40}]
    # The steps after the last record count as time between runs.
    assert goodput.seconds_between_runs == 300 + 10
    assert goodput.summary().endswith("; 2 runs, 0:05:10 between them, 5 steps repeated")


def test_unreadable_record_is_an_error_and_is_not_replaced(clock, run_info, tmp_path):
    (tmp_path / "goodput.json").write_text("{")
    log = GoodputLog(Goodput(clock=clock), clock=clock)
    with pytest.raises(json.JSONDecodeError):
        log.start(run_info(job_log_dir=epath.Path(tmp_path)))
    log.close()
    assert (tmp_path / "goodput.json").read_text() == "{"
