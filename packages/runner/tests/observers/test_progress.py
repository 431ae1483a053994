from __future__ import annotations

import io
import itertools

import pytest

from layerkit_runner.observers import Progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def simulate(run_info, clock):
    """Runs the reports of a whole training through plain lines and returns what was printed."""

    def simulate(*, steps, seconds_per_step, summary_interval, start_step=0):
        stream = io.StringIO()
        progress = Progress(stream=stream, clock=clock)
        progress.start(run_info(num_train_steps=steps, start_step=start_step))
        for step in range(start_step + 1, steps + 1):
            clock.now += seconds_per_step
            progress.progress(step)
            if step == start_step + 1 or step % summary_interval == 0:
                progress.train_metrics(step, {"loss": 1000 / step, "tokens_per_sec": 1234.5})
        progress.close()
        return stream.getvalue().splitlines()

    return simulate


def test_lines_contain_step_loss_rate_and_remaining_time(simulate):
    lines = simulate(steps=1000, seconds_per_step=0.5, summary_interval=100)
    assert lines[0] == "step 1/1000 | loss 1000.0000 | 1,234 tokens/s"
    # 100 steps done in 50 s, of which the first 0.5 s lie before the clock of the estimate.
    assert lines[2] == "step 200/1000 | loss 5.0000 | 1,234 tokens/s | 0:06:40 left"
    assert lines[-1] == "step 1000/1000 | loss 1.0000 | 1,234 tokens/s"


@pytest.mark.parametrize(
    ("steps", "seconds_per_step", "summary_interval"),
    [(10, 0.1, 1), (2000, 0.1, 1), (2000, 0.1, 100), (20_000, 0.18, 50), (60_000, 1.0, 10)],
)
def test_a_run_prints_dozens_of_lines_not_thousands(
    simulate, steps, seconds_per_step, summary_interval
):
    lines = simulate(
        steps=steps, seconds_per_step=seconds_per_step, summary_interval=summary_interval
    )
    assert min(10, steps) <= len(lines) <= 100
    assert f"step {steps}/{steps}" in lines[-1]


def test_resumed_run_paces_and_estimates_the_remaining_steps(simulate):
    lines = simulate(steps=1000, seconds_per_step=1, summary_interval=10, start_step=900)
    assert lines[0].startswith("step 901/1000 | ")
    assert lines[1].startswith("step 910/1000 | ")
    assert lines[1].endswith("| 0:01:30 left")


@pytest.mark.parametrize("evaluates", [True, False])
def test_last_step_is_printed_once_and_before_its_evaluation(run_info, clock, evaluates):
    stream = io.StringIO()
    progress = Progress(stream=stream, clock=clock)
    progress.start(run_info(num_train_steps=1000))
    for step in range(1, 5):
        clock.now += 1.0
        progress.progress(step)
        progress.train_metrics(step, {"loss": 1.0 / step})
    if evaluates:
        progress.eval_metrics(4, "held_out", {"loss": 2.0})
    progress.message("stopped early")
    progress.close()
    last = "step 4/1000 | loss 0.2500"
    assert stream.getvalue().splitlines() == [
        "step 1/1000 | loss 1.0000",
        *([f"{last} | 0:16:36 left", "step 4 | eval held_out | loss 2"] if evaluates else []),
        "stopped early",
        *([] if evaluates else [last]),
    ]


@pytest.mark.parametrize(("hours", "most"), [(1, 90), (24, 130), (24 * 30, 900)])
def test_number_of_lines_and_gaps_between_them_are_bounded(simulate, hours, most):
    steps = hours * 360
    lines = simulate(steps=steps, seconds_per_step=10, summary_interval=1)
    assert len(lines) <= most
    printed = [int(line.split()[1].split("/")[0]) for line in lines]
    gaps = [10 * (later - earlier) for earlier, later in itertools.pairwise(printed)]
    assert max(gaps) <= min(3600, max(30, steps)) + 10


def test_terminal_shows_a_bar_with_messages_above_it(run_info):
    stream = Terminal()
    progress = Progress(stream=stream)
    progress.start(run_info(num_train_steps=10, start_step=4))
    for step in range(5, 11):
        progress.train_metrics(step, {"loss": 2.5, "tokens_per_sec": 9876.0, "mfu": 0.412})
        progress.progress(step)
        if step == 7:
            progress.message("checkpoint 7 saved")
    progress.close()
    shown = stream.getvalue()
    assert "| 5/10 [" in shown  # a resumed run begins where it is
    assert "| 10/10 [" in shown
    assert "loss 2.5000, 9,876 tokens/s, mfu 41.2%" in shown
    # On a line of its own: the bar is cleared before it and drawn anew after it.
    assert "\rcheckpoint 7 saved\n" in shown
    assert shown.endswith("\n")
