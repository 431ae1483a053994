from __future__ import annotations

import pytest

from layerkit_runner.config.resolve import resolve
from layerkit_runner.tools.plan.search.advice import Advice, advise
from layerkit_runner.tools.plan.search.forecast import Forecast
from layerkit_runner.tools.plan.search.pages import advice_lines


@pytest.fixture(scope="module")
def resolved(tunable_lm):
    return resolve(tunable_lm())


def advised(resolved, usable, plan_for, trials_for, devices, **limits):
    plan = plan_for(resolved, usable)
    assert plan.fits is False
    trials = trials_for(usable, **limits)
    found = list(advise(Forecast(resolved, plan, devices), trials))
    assert len(found) <= trials.limits.compilations
    return found, trials


@pytest.mark.slow
@pytest.mark.parametrize("part", [0.9, 0.6, 0.3])
def test_advice_that_is_followed_fits(resolved, plan_for, trials_for, devices, resolve_flags, part):
    usable = round(part * plan_for(resolved).memory.peak)
    found, _ = advised(resolved, usable, plan_for, trials_for, devices)
    fitting = [each for each in found if each.fits]
    assert fitting
    for advice in fitting:
        assert advice.peak <= usable
        plan = plan_for(resolve_flags(advice.flags), usable)
        assert (plan.fits, plan.memory.peak) == (True, advice.peak)
    lines = list(advice_lines(found, plan_for(resolved, usable)))
    assert f"  fits  {' '.join(fitting[0].flags)}" in lines


@pytest.mark.slow
def test_changes_are_put_together_where_none_is_enough_alone(
    resolved, plan_for, trials_for, devices, resolve_flags
):
    smallest = resolve_flags(["--fdl.CHECKPOINT_POLICY=full", "--fdl.ICI_MESH_SHAPE=[1,8,1]"])
    usable = round(1.02 * plan_for(smallest).memory.peak)
    found, _ = advised(resolved, usable, plan_for, trials_for, devices)
    fitting = [each for each in found if each.fits]
    assert fitting
    assert len(fitting[0].flags) > 1
    assert plan_for(resolve_flags(fitting[0].flags), usable).fits


@pytest.mark.slow
def test_one_change_that_fits_and_a_limit(small, plan_for, trials_for, devices):
    usable = plan_for(small).memory.peak - 1
    found, trials = advised(small, usable, plan_for, trials_for, devices, compilations=1)
    (advice,) = found
    # It keeps the least already, and a moment of half the size is what comes next.
    assert advice.flags == ["--fdl.task.model.lm_tpl.softmax_tpl.chunk_size=1"]
    assert advice.fits is (advice.peak <= usable)
    assert trials.reached == "1 compilations (--max_compilations)"


def test_nothing_helps_where_there_is_no_memory(small, plan_for, trials_for, devices):
    found, trials = advised(small, 100, plan_for, trials_for, devices, compilations=0)
    assert (found, trials.compiled) == ([], 0)
    plan = plan_for(small, 100)
    # Weights and two moments of float32, and a few counters.
    state = 3 * 4 * plan.num_params
    *_, last = advice_lines(found, plan)
    assert last.startswith(f"weights and optimizer take {state / 1000:.1f} kB in all, as much as ")
    assert state // 100 <= int(last.split()[11].replace(",", "")) <= state // 100 + 2


def test_the_lines(small, plan_for):
    advice = [
        Advice(["--fdl.A=1", "--fdl.B=2"], "a; b", 71_200_000_000, fits=True, step_seconds=1.43),
        Advice(["--fdl.C=3"], "c", 80_100_000_000, fits=False, step_seconds=None),
        Advice(["--fdl.D=4"], "d", None, fits=False, step_seconds=None, reason="it is refused"),
    ]
    assert list(advice_lines(advice, plan_for(small, 100))) == [
        "what would make it fit; each is compiled",
        "  fits  --fdl.A=1 --fdl.B=2",
        "        a; b: 71.2 GB on each device, 1.43 s a step",
        "  no    --fdl.C=3",
        "        c: 80.1 GB on each device",
        "  no    --fdl.D=4",
        "        d: it is refused",
    ]
