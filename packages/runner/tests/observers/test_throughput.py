from __future__ import annotations

import pytest

from layerkit_runner.observers import StepWork, Throughput


class Clock:
    def __init__(self):
        self.now = 50.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def timed(run_info, clock):
    facts = {
        "tokens_per_step": 1000,
        "examples_per_step": 10,
        "flops_per_step": 6e12,
        "num_devices": 4,
        "peak_flops_per_device": 1e13,
    }
    return lambda **changes: Throughput(run_info(**{**facts, **changes}), clock=clock)


def run_steps(throughput, clock, steps, *, seconds):
    for step in steps:
        clock.now += seconds
        throughput.completed(step)


def test_rates_are_means_over_the_steps_since_the_last_call(timed, clock):
    throughput = timed()
    rates = throughput.rates_since_asked()
    run_steps(throughput, clock, [1], seconds=60)  # with compilation
    assert rates() == {}
    run_steps(throughput, clock, range(2, 12), seconds=0.5)
    # 2 steps/s x 6 TFLOP on 4 devices = 3 TFLOP/s each, of 10.
    assert rates() == pytest.approx(
        {
            "step_time": 0.5,
            "steps_per_sec": 2.0,
            "input_wait": 0.0,
            "examples_per_sec": 20.0,
            "tokens_per_sec": 2000.0,
            "tflops_per_sec_per_device": 3.0,
            "mfu": 0.3,
        }
    )
    assert rates() == {}  # nothing since


def test_rates_sum_the_work_of_steps_of_different_sizes(timed, clock):
    throughput = timed()
    rates = throughput.rates_since_asked()
    run_steps(throughput, clock, [1], seconds=60)
    large, small = StepWork(30, 3000, 12e12), StepWork(10, 0, 2e12)
    for step, work in ((2, large), (3, small), (4, small)):
        clock.now += 0.5
        throughput.completed(step, work)
    found = rates()
    assert found["examples_per_sec"] == pytest.approx(50 / 1.5)
    assert found["tokens_per_sec"] == pytest.approx(3000 / 1.5)
    assert found["tflops_per_sec_per_device"] == pytest.approx(16 / 1.5 / 4)


def test_each_rates_function_has_a_separate_window(timed, clock):
    throughput = timed()
    one, other = throughput.rates_since_asked(), throughput.rates_since_asked()
    run_steps(throughput, clock, [1, 2], seconds=1)
    assert one()["step_time"] == 1
    run_steps(throughput, clock, [3], seconds=4)
    assert one()["step_time"] == 4
    assert other()["step_time"] == 2.5


def test_unknown_rates_are_omitted(timed, clock):
    throughput = timed(tokens_per_step=0, flops_per_step=None)
    rates = throughput.rates_since_asked()
    run_steps(throughput, clock, [1, 2], seconds=1)
    assert set(rates()) == {
        "step_time",
        "steps_per_sec",
        "input_wait",
        "examples_per_sec",
    }
    throughput = timed(peak_flops_per_device=None)
    rates = throughput.rates_since_asked()
    run_steps(throughput, clock, [1, 2], seconds=1)
    found = rates()
    assert "tflops_per_sec_per_device" in found
    assert "mfu" not in found


def test_overall_covers_all_windows(timed, clock):
    throughput = timed()
    rates = throughput.rates_since_asked()
    run_steps(throughput, clock, [1, 2, 3], seconds=1)
    assert rates()["step_time"] == 1
    run_steps(throughput, clock, [4, 5], seconds=4)
    assert rates()["step_time"] == 4
    assert throughput.overall()["step_time"] == (1 + 1 + 4 + 4) / 4


def test_a_resumed_run_does_not_count_the_steps_before_it(timed, clock):
    throughput = timed(start_step=500)
    run_steps(throughput, clock, [501], seconds=30)
    run_steps(throughput, clock, [502, 503], seconds=2)
    assert throughput.overall()["steps_per_sec"] == 0.5


def test_nested_pauses_are_excluded(timed, clock):
    throughput = timed()
    rates = throughput.rates_since_asked()
    run_steps(throughput, clock, [1, 2], seconds=1)
    rates()
    with throughput.pause():
        clock.now += 100
        with throughput.pause():
            clock.now += 100
        clock.now += 100
    run_steps(throughput, clock, [3, 4], seconds=1)
    assert rates()["step_time"] == 1


def test_time_of_a_step_before_a_pause_counts(timed, clock):
    throughput = timed()
    rates = throughput.rates_since_asked()
    throughput.completed(1)
    clock.now += 0.75
    with throughput.pause():
        clock.now += 40
    clock.now += 0.25
    throughput.completed(2)
    assert rates()["step_time"] == 1


def test_steps_that_end_within_a_pause_are_not_counted(timed, clock):
    throughput = timed()
    throughput.completed(1)
    with throughput.pause():
        run_steps(throughput, clock, [2, 3], seconds=5)
        clock.now += 5
    run_steps(throughput, clock, [4, 5], seconds=2)
    assert throughput.overall()["steps_per_sec"] == 0.5


def test_pause_before_the_first_step_has_no_effect(timed, clock):
    throughput = timed()
    with throughput.pause():
        clock.now += 5
    run_steps(throughput, clock, [1, 2], seconds=2)
    assert throughput.overall()["step_time"] == 2


def test_input_wait_is_a_share_of_the_time_of_steps(timed, clock):
    throughput = timed()
    rates = throughput.rates_since_asked()
    throughput.waited(30)  # for the first batch, which no step is timed with
    run_steps(throughput, clock, [1], seconds=60)
    throughput.waited(0.5)
    with throughput.pause():
        throughput.waited(9)
    run_steps(throughput, clock, [2, 3], seconds=1)
    assert rates()["input_wait"] == 0.25
    run_steps(throughput, clock, [4, 5], seconds=1)
    assert rates()["input_wait"] == 0
    assert throughput.overall()["input_wait"] == 0.125
