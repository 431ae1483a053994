from __future__ import annotations

import dataclasses
import json

import pytest

from layerkit.sharding import DEFAULT_RULES
from layerkit_runner.config.resolve import resolve
from layerkit_runner.errors import UsageError
from layerkit_runner.tools.plan.search.pages import search_json, search_page
from layerkit_runner.tools.plan.search.search import Candidate, Search, order, search


@pytest.fixture(scope="module")
def resolved(tunable_lm):
    return resolve(tunable_lm())


@pytest.mark.slow
def test_a_search_ranks_what_fits(resolved, plan_for, trials_for, devices, resolve_flags):
    usable = round(0.8 * plan_for(resolved).memory.peak)
    found = search(resolved, trials_for(usable, compilations=5), devices)
    assert found.compilations == len(found.ranked) == 5
    assert found.num_meshes == 10
    assert sum(found.left_out.values()) + 5 == 10 * len(found.policies)
    assert found.limit == "5 compilations (--max_compilations)"
    # Two heads are not divided by more.
    assert found.left_out["the mesh does not divide the model or the batch"] >= 3 * 6
    own = [each for each in found.ranked if not each.flags]
    assert [each.fits for each in own] == [False]
    best = found.ranked[0]
    assert best.fits is True
    assert best.peak <= usable
    # All rows are those of a plan, and the best command makes the best row.
    plan = plan_for(resolve_flags(found.command), usable)
    assert (plan.fits, plan.memory.peak, plan.mesh) == (True, best.peak, best.mesh)
    fits = [each.fits for each in found.ranked]
    assert fits == sorted(fits, reverse=True)
    assert json.loads(search_json(found))["ranked"][0]["flags"] == best.flags


@pytest.mark.slow
def test_the_same_search_finds_the_same(resolved, trials_for, devices):
    first, second = (search(resolved, trials_for(compilations=3), devices) for _ in range(2))
    assert first.ranked == second.ranked
    assert first.command == second.command


@pytest.mark.slow
def test_an_axis_that_splits_nothing_is_not_chosen_for_sending_nothing(
    tunable_lm, trials_for, devices
):
    class Unsplit(tunable_lm):
        """All devices of `tensor` do the same, on enough rows that this takes longer than sums."""

        PERCORE_BATCH_SIZE = 4096

        def partitioner(self):
            partitioner = super().partitioner()
            names = [name for name, axes in DEFAULT_RULES.table if axes == "tensor"]
            partitioner.rules = DEFAULT_RULES.replace(**dict.fromkeys(names))
            return partitioner

    found = search(resolve(Unsplit()), trials_for(compilations=2), devices)
    assert [each.mesh["tensor"] for each in found.ranked] == [1, 8]
    assert found.ranked[0].bytes_sent > found.ranked[1].bytes_sent == 0
    # None of its speeds is told, since none is known; what stands in for them is.
    assert found.ranked[0].step_seconds is None
    assert set(found.assumed) == {
        *("peak FLOP/s", "memory bandwidth", "bandwidth within a slice", "latency")
    }


FOUND = Search(
    experiment="lm.Small",
    target="h100x8",
    num_devices=8,
    usable_bytes=78_147_540_748,
    rows=32,
    ranked=[
        Candidate(
            ["--fdl.ICI_MESH_SHAPE=[1,8,1]", "--fdl.CHECKPOINT_POLICY=dots"],
            {"data": 1, "fsdp": 8, "tensor": 1},
            "dots",
            estimated_peak=60_000_000_000,
            peak=61_200_000_000,
            fits=True,
            step_seconds=1.21,
            step_seconds_no_overlap=1.5,
            mfu=0.56,
            mfu_no_overlap=0.45,
            limited_by="compute",
            bytes_sent=10_000_000,
        ),
        Candidate(
            [],
            {"data": 8, "fsdp": 1, "tensor": 1},
            "full",
            peak=90_000_000_000,
            fits=False,
            step_seconds=1.31,
            step_seconds_no_overlap=1.4,
            mfu=0.51,
            mfu_no_overlap=0.48,
            limited_by="fast network",
            bytes_sent=20_000_000,
        ),
        Candidate(
            ["--fdl.ICI_MESH_SHAPE=[2,2,2]"],
            {"data": 2, "fsdp": 2, "tensor": 2},
            "full",
            reason="the compiler: something that nobody knows",
        ),
    ],
    command=["--fdl.NUM_LAYERS=2", "--fdl.ICI_MESH_SHAPE=[1,8,1]", "--fdl.CHECKPOINT_POLICY=dots"],
    num_meshes=10,
    policies=["full", "dots"],
    left_out={"the mesh does not divide the model or the batch": 12, "not reached": 5},
    limit="3 compilations (--max_compilations)",
    compilations=3,
    seconds=61.4,
)

PAGE = """\
search for lm.Small
on h100x8, 8 devices, 78.1 GB on each; 32 rows in a batch
10 meshes × 2 policies: 3 compiled in 61 s
  12 left out: the mesh does not divide the model or the batch
  5 left out: not reached
ended by the limit of 3 compilations (--max_compilations)

      data × fsdp × tensor  remat              peak  fits   step     none hidden  MFU
  1   1 × 8 × 1             dots            61.2 GB  yes    1.21 s   1.5 s        56 %  compute
  2 * 8 × 1 × 1             full              90 GB  no     1.31 s   1.4 s        51 %  fast network
  3   2 × 2 × 2             full          the compiler: something that nobody knows
* as it is

the best
  --exp=lm.Small --fdl.NUM_LAYERS=2 --fdl.ICI_MESH_SHAPE=[1,8,1] --fdl.CHECKPOINT_POLICY=dots"""


def test_the_page():
    assert search_page(FOUND) == PAGE


def test_the_page_where_no_speed_is_known():
    ranked = [
        dataclasses.replace(
            each,
            step_seconds=None,
            step_seconds_no_overlap=None,
            mfu=None,
            fits=None,
            order_seconds=None if each.reason else seconds,
        )
        for each, seconds in zip(FOUND.ranked, (2.0, 2.5, 3.0), strict=True)
    ]
    assumed = {"peak FLOP/s": 1.97e14, "memory bandwidth": 8.19e11, "latency": 1e-6}
    lines = search_page(
        dataclasses.replace(FOUND, ranked=ranked, usable_bytes=None, assumed=assumed)
    ).splitlines()
    assert lines[1] == "on h100x8, 8 devices; 32 rows in a batch"
    (start,) = [at for at, line in enumerate(lines) if "data × fsdp × tensor" in line]
    assert lines[start : start + 7] == [
        "      data × fsdp × tensor  remat              peak  fits   sent by each device"
        "  nominal time",
        "  1   1 × 8 × 1             dots            61.2 GB  ?      10 MB              "
        "  1.00 × the best",
        "  2 * 8 × 1 × 1             full              90 GB  ?      20 MB              "
        "  1.25 × the best",
        "  3   2 × 2 × 2             full          the compiler: something that nobody knows",
        "* as it is",
        "not known of these devices, in no time above, and taken in the order alone for:",
        "  peak 197 TFLOP/s, memory bandwidth 819 GB/s, latency of a collective 1 µs",
    ]


SLICED = Candidate(
    [],
    {"data": 2, "fsdp": 64, "tensor": 1},
    "full",
    across={"data": 2},
    peak=27_700_000_000,
    fits=True,
    step_seconds=4.5,
    step_seconds_no_overlap=4.75,
    mfu=0.7,
    limited_by="compute",
    bytes_sent=130_000_000_000,
    bytes_slow=1_370_000_000,
    order_seconds=9.387,
)
# Less in all, but ten times as much to the other slice.
ACROSS = dataclasses.replace(
    SLICED,
    across={"fsdp": 2},
    step_seconds_no_overlap=4.5,
    bytes_slow=13_700_000_000,
    order_seconds=10.37,
)


def test_the_order_goes_by_what_fits_then_by_time_then_by_memory():
    late = dataclasses.replace(SLICED, order_seconds=12.0)
    large = dataclasses.replace(SLICED, peak=SLICED.peak + 1)
    too_large = dataclasses.replace(SLICED, fits=False, order_seconds=1.0)
    failed = dataclasses.replace(SLICED, reason="the compiler: something", order_seconds=0.5)
    wanted = [SLICED, large, ACROSS, late, too_large, failed]
    found = [failed, late, large, ACROSS, too_large, SLICED]
    assert sorted(found, key=order) == wanted


def test_of_what_has_no_program_first_what_computes_least_again():
    full = dataclasses.replace(SLICED, fits=False, order_seconds=None)
    dots = dataclasses.replace(full, remat="dots")
    assert sorted([full, dots, SLICED], key=order) == [SLICED, dots, full]


def test_the_page_tells_slices_apart():
    assumed = {"bandwidth between slices": 1e10}
    found = dataclasses.replace(FOUND, ranked=[SLICED, ACROSS], assumed=assumed)
    lines = search_page(found).splitlines()
    (start,) = [at for at, line in enumerate(lines) if "data × fsdp × tensor" in line]
    assert lines[start : start + 6] == [
        "      data × fsdp × tensor       remat              peak  fits        slow"
        "  step     none hidden  MFU",
        "  1 * 2 × 64 × 1, data 2 across  full            27.7 GB  yes      1.37 GB"
        "  4.5 s    4.75 s       70 %  compute",
        "  2 * 2 × 64 × 1, fsdp 2 across  full            27.7 GB  yes      13.7 GB"
        "  4.5 s    4.5 s        70 %  compute",
        "* as it is",
        "not known of these devices, in no time above, and taken in the order alone for:",
        "  bandwidth between slices 10 GB/s",
    ]


@pytest.mark.slow
def test_pmap_has_no_mesh_to_choose(tunable_lm, trials_for, devices):
    resolved = resolve(tunable_lm(USE_PMAP=True))
    with pytest.raises(UsageError, match="runs under PmapPartitioner on batch 8"):
        search(resolved, trials_for(compilations=1), devices)


def test_an_experiment_that_cannot_be_planned(tunable_lm, trials_for, devices):
    resolved = resolve(tunable_lm(ICI_MESH_SHAPE=[1, 1, 8]))
    with pytest.raises(UsageError, match="cannot be planned as it is: .* cannot be split evenly"):
        search(resolved, trials_for(compilations=1), devices)
