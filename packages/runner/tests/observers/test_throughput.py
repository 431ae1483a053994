from __future__ import annotations

from types import SimpleNamespace

import jax
import pytest

from layerkit_runner.observers import Goodput, StepWork, Throughput, memory_scalars, peak_flops


@pytest.fixture
def timed(run_info, clock):
    facts = {
        "tokens_per_step": 1000,
        "examples_per_step": 10,
        "flops_per_step": 6e12,
        "num_devices": 4,
        "peak_flops_per_device": 1e13,
    }

    def timed(**changes):
        goodput = Goodput(clock=clock)
        goodput.outermost("steps")
        return Throughput(run_info(**{**facts, **changes}), goodput)

    return timed


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
    result = rates()
    assert result["examples_per_sec"] == pytest.approx(50 / 1.5)
    assert result["tokens_per_sec"] == pytest.approx(3000 / 1.5)
    assert result["tflops_per_sec_per_device"] == pytest.approx(16 / 1.5 / 4)


def test_each_rates_function_has_a_separate_window(timed, clock):
    throughput = timed()
    one, other = throughput.rates_since_asked(), throughput.rates_since_asked()
    run_steps(throughput, clock, [1, 2], seconds=1)
    assert one()["step_time"] == 1
    run_steps(throughput, clock, [3], seconds=4)
    assert one()["step_time"] == 4
    assert other()["step_time"] == throughput.overall()["step_time"] == 2.5


def test_unknown_rates_are_omitted(timed, clock):
    throughput = timed(tokens_per_step=0, flops_per_step=None)
    run_steps(throughput, clock, [1, 2], seconds=1)
    known = {"step_time", "steps_per_sec", "input_wait", "examples_per_sec"}
    assert set(throughput.overall()) == known
    throughput = timed(peak_flops_per_device=None)
    run_steps(throughput, clock, [1, 2], seconds=1)
    assert set(throughput.overall()) == {*known, "tokens_per_sec", "tflops_per_sec_per_device"}


def test_time_of_other_phases_is_excluded_but_not_that_of_a_step_before_them(timed, clock):
    throughput = timed()
    throughput.completed(1)
    clock.now += 0.75
    with throughput.goodput.phase("eval"):
        clock.now += 300
    clock.now += 0.25
    throughput.completed(2)
    assert throughput.overall()["step_time"] == 1


def test_steps_that_end_within_another_phase_are_not_counted(timed, clock):
    throughput = timed()
    throughput.completed(1)
    with throughput.goodput.phase("save"):
        run_steps(throughput, clock, [2, 3], seconds=5)
        clock.now += 5
    run_steps(throughput, clock, [4, 5], seconds=2)
    assert throughput.overall()["steps_per_sec"] == 0.5


def test_input_wait_is_a_share_of_the_time_of_steps(timed, clock):
    throughput = timed()
    rates, moved = throughput.rates_since_asked(), throughput.goodput.moved
    moved("input_wait", 30)  # for the first batch, which no step is timed with
    run_steps(throughput, clock, [1], seconds=60)
    moved("input_wait", 0.5)
    run_steps(throughput, clock, [2, 3], seconds=1)
    assert rates()["input_wait"] == 0.25
    run_steps(throughput, clock, [4, 5], seconds=1)
    assert rates()["input_wait"] == 0
    assert throughput.overall()["input_wait"] == 0.125


def test_device_memory_is_the_maximum_over_devices(monkeypatch):
    stats = [{"bytes_in_use": size, "peak_bytes_in_use": 2 * size} for size in (5, 7, 6)]
    devices = [SimpleNamespace(memory_stats=lambda each=each: each) for each in stats]
    monkeypatch.setattr(jax, "local_devices", lambda: devices)
    scalars = memory_scalars()
    assert scalars["memory/device_bytes_in_use"] == 7
    assert scalars["memory/device_peak_bytes_in_use"] == 14


@pytest.mark.parametrize(
    ("device_kind", "teraflops"),
    [
        ("TPU v4", 275),
        ("TPU v5", 459),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA B200", 2250),
    ],
)
def test_peak_flops_of_known_devices(device_kind, teraflops):
    assert peak_flops(device_kind) == pytest.approx(teraflops * 1e12)


@pytest.mark.parametrize(
    "device_kind", ["cpu", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "TPU v99", "NVIDIA T400", ""]
)
def test_peak_flops_of_unknown_devices_is_none(device_kind):
    assert peak_flops(device_kind) is None
