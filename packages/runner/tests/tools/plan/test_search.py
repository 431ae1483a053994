from __future__ import annotations

import dataclasses
import json

import jax
import pytest

from layerkit.base.sharding import DEFAULT_RULES
from layerkit_runner.errors import UsageError
from layerkit_runner.run.resolve import resolve
from layerkit_runner.tools.plan.bounds import DeviceWork, step_bounds
from layerkit_runner.tools.plan.hardware import Target, device_kind
from layerkit_runner.tools.plan.plan import StateTooLargeError, make_plan
from layerkit_runner.tools.plan.search import (
    Candidate,
    Point,
    estimate_seconds,
    neighbors,
    order,
    search,
    search_page,
)

AXES = ("data", "fsdp", "tensor")
CPU = device_kind("cpu")


@pytest.fixture(scope="module")
def tunable_lm(small_lm):
    """`SmallLm` with everything kept for the backward pass, on a mesh of data alone."""

    class TunableLm(small_lm):
        MESH = [8, 1, 1]
        PERCORE_BATCH_SIZE = 4
        POLICY: str = "none"

        def task(self):
            task = super().task()
            task.model.lm_tpl.stack_tpl.remat = self.POLICY
            return task

    return TunableLm


def searched(experiment, *, memory=None, compilations=3, seconds=600.0, **options):
    """A search on eight simulated devices, each with `memory` bytes."""
    kind = dataclasses.replace(CPU, memory_bytes=memory)
    return search(
        resolve(experiment),
        jax.devices("cpu")[:8],
        target=Target(kind, 8),
        max_compilations=compilations,
        max_seconds=seconds,
        **options,
    )


def test_neighbors_differ_in_one_choice():
    point = Point(ici=(1, 6, 1), remat="dots")
    assert list(neighbors(point, AXES, fits=True)) == [
        point._replace(remat="none"),
        point._replace(remat="dots_no_batch"),
        point._replace(ici=(2, 3, 1)),
        point._replace(ici=(1, 3, 2)),
    ]


def test_neighbors_of_a_point_that_does_not_fit_keep_less_and_accumulate_gradients():
    point = Point(ici=(1, 1), remat="none", accumulation=2)
    near = list(neighbors(point, ("data", "fsdp"), fits=False))
    assert near == [point._replace(remat="dots"), point._replace(accumulation=4)]


def test_neighbors_move_slices_between_data_and_fsdp_alone():
    point = Point(ici=(1, 1, 1, 4), dcn=(1, 2, 1, 1))
    near = list(neighbors(point, ("stage", "data", "fsdp", "expert"), fits=True))
    assert near == [point._replace(dcn=(1, 1, 2, 1))]


@pytest.mark.slow
def test_search_ranks_candidates_that_fit_first(tunable_lm):
    own = make_plan(resolve(tunable_lm()), jax.devices("cpu")[:8]).memory.peak
    usable = round(0.8 * own)
    result = searched(tunable_lm(), memory=usable, compilations=5)
    assert result.compilations == len(result.ranked) == 5
    assert result.limit == "5 compilations (--max_compilations)"
    (as_it_is,) = [each for each in result.ranked if not each.flags]
    assert (as_it_is.peak, as_it_is.fits) == (own, False)
    fits = [each.fits for each in result.ranked]
    assert fits == sorted(fits, reverse=True)
    best = result.ranked[0]
    assert best.fits is True
    assert best.peak <= usable
    assert json.loads(json.dumps(dataclasses.asdict(result)))["ranked"][0]["flags"] == best.flags
    assert "with an H100's peak_flops, memory_bandwidth" in search_page(result)
    staged = dataclasses.replace(result, num_stages=2)
    assert "of 2 STAGES, that of the one with the largest memory" in search_page(staged)


@pytest.mark.slow
def test_flags_of_the_best_candidate_make_its_plan(tunable_lm):
    from layerkit_runner.config.experiment import experiment_fields
    from layerkit_runner.config.flags import parse_flags
    from layerkit_runner.config.requests import parse_fields

    result = searched(tunable_lm(NUM_LAYERS=2), memory=300_000)
    assert result.command[0] == "--fdl.NUM_LAYERS=2"
    overrides = parse_flags(["--exp=x", "--mode=plan", *result.command]).overrides
    fields = parse_fields("TunableLm", experiment_fields(tunable_lm), overrides)
    resolved = resolve(tunable_lm(**fields), [each for each in overrides if each.is_deep])
    plan = make_plan(resolved, jax.devices("cpu")[:8])
    best = result.ranked[0]
    assert (plan.memory.peak, plan.mesh) == (best.peak, best.mesh)


@pytest.mark.slow
def test_search_is_deterministic(tunable_lm):
    first, second = (searched(tunable_lm()) for _ in range(2))
    assert first.ranked == second.ranked
    assert first.command == second.command


@pytest.mark.slow
def test_axis_that_splits_no_weight_is_not_ranked_best(tunable_lm):
    class Unsplit(tunable_lm):
        """All devices of `tensor` compute the same."""

        PERCORE_BATCH_SIZE = 64
        MESH = [1, 1, 8]

        def partitioner(self):
            partitioner = super().partitioner()
            names = [name for name, axes in DEFAULT_RULES.table if axes == "tensor"]
            partitioner.rules = DEFAULT_RULES.replace(**dict.fromkeys(names))
            return partitioner

    result = searched(Unsplit(POLICY="full"))
    unchanged = next(plan for plan in result.ranked if not plan.flags)
    assert (unchanged.bounds.work.fast_bytes, unchanged.bounds.work.slow_bytes) == (0, 0)
    assert result.ranked[0].mesh["tensor"] < 8


@pytest.mark.slow
def test_candidate_whose_state_exceeds_the_memory_is_not_compiled(tunable_lm):
    experiment = tunable_lm(
        MESH=[1, 8, 1], MODEL_DIMS=64, PERCORE_BATCH_SIZE=1, NUM_LAYERS=2, POLICY="full"
    )
    own = make_plan(resolve(experiment), jax.devices("cpu")[:8])
    state = own.memory.weights + own.memory.optimizer
    # Half as much fsdp is about twice the state of each device, unless tensor splits it instead.
    result = searched(experiment, memory=round(1.3 * state), compilations=6)
    assert result.left_out["weights and optimizer state alone exceed the memory"] >= 1
    assert all(each.mesh["data"] == 1 for each in result.ranked)


def test_state_that_exceeds_the_memory_is_an_error_before_compilation(tunable_lm):
    target = Target(dataclasses.replace(CPU, memory_bytes=1000), 8)
    resolved = resolve(tunable_lm())
    with pytest.raises(StateTooLargeError):
        make_plan(resolved, jax.devices("cpu")[:8], target=target, check_state=True)


@pytest.mark.slow
def test_search_under_pmap_raises(raises, tunable_lm):
    with raises(UsageError, field="partitioner", value="PmapPartitioner"):
        searched(tunable_lm(USE_PMAP=True))


@pytest.mark.slow
def test_search_from_the_command_line(plan_json, tmp_path):
    result = plan_json("--search", "--fdl.NUM_LAYERS=2", "--max_compilations=2")
    assert (result["compilations"], len(result["ranked"])) == (2, 2)
    assert result["command"][0] == "--fdl.NUM_LAYERS=2"
    assert list(tmp_path.iterdir()) == []


def test_candidates_are_ordered_by_fit_then_time_then_memory():
    best = Candidate([], {"data": 2}, "full", peak=27_700_000_000, fits=True, seconds=4.5)
    late = dataclasses.replace(best, seconds=4.75)
    large = dataclasses.replace(best, peak=best.peak + 1)
    too_large = dataclasses.replace(best, fits=False)
    larger = dataclasses.replace(too_large, peak=too_large.peak + 1)
    failed = dataclasses.replace(best, reason="the compiler: something")
    in_order = [best, large, late, too_large, larger, failed]
    mixed = [failed, larger, late, large, best, too_large]
    assert sorted(mixed, key=order) == in_order


def test_estimated_time_is_the_mean_of_both_bounds():
    work = DeviceWork(1e15, memory_bytes=3e10, fast_bytes=1e11, slow_bytes=1e9)
    bounds = step_bounds(work, device_kind("h100"), model_flops_per_device=1e15, tokens=None)
    mean = (bounds.step_seconds + bounds.step_seconds_no_overlap) / 2
    assert estimate_seconds(work, device_kind("h100")) == pytest.approx(mean)
    # The rates of an H100 stand in for unknown ones.
    assert estimate_seconds(work, CPU) == estimate_seconds(work, device_kind("h100"))
