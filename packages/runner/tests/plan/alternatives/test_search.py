from __future__ import annotations

import dataclasses
import json

import pytest

from layerkit_runner.configuration.resolve import resolve
from layerkit_runner.errors import UsageError
from layerkit_runner.plan.alternatives.pages import search_json, search_page
from layerkit_runner.plan.alternatives.search import Candidate, Search, order, search


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
            each, step_seconds=None, step_seconds_no_overlap=None, mfu=None, fits=None
        )
        for each in FOUND.ranked
    ]
    lines = search_page(dataclasses.replace(FOUND, ranked=ranked, usable_bytes=None)).splitlines()
    assert lines[1] == "on h100x8, 8 devices; 32 rows in a batch"
    (own,) = [line for line in lines if " * 8 × 1 × 1 " in line]
    assert " ".join(own.split()) == "2 * 8 × 1 × 1 full 90 GB ? 20 MB"


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
    guessed_seconds=0.137,
)
# Less in all, but ten times as much to the other slice.
ACROSS = dataclasses.replace(
    SLICED,
    across={"fsdp": 2},
    step_seconds_no_overlap=4.5,
    bytes_slow=13_700_000_000,
    guessed_seconds=1.37,
)


def test_a_network_of_unknown_speed_counts_in_the_order():
    assert sorted([ACROSS, SLICED], key=order) == [SLICED, ACROSS]
    known = [dataclasses.replace(each, guessed_seconds=0.0) for each in (SLICED, ACROSS)]
    assert sorted(known, key=order) == known[::-1]


def test_the_page_tells_slices_apart():
    found = dataclasses.replace(FOUND, ranked=[SLICED, ACROSS])
    lines = search_page(found).splitlines()
    (start,) = [at for at, line in enumerate(lines) if "data × fsdp × tensor" in line]
    assert lines[start : start + 5] == [
        "      data × fsdp × tensor       remat              peak  fits        slow"
        "  step     none hidden  MFU",
        "  1 * 2 × 64 × 1, data 2 across  full            27.7 GB  yes      1.37 GB"
        "  4.5 s    4.75 s       70 %  compute",
        "  2 * 2 × 64 × 1, fsdp 2 across  full            27.7 GB  yes      13.7 GB"
        "  4.5 s    4.5 s        70 %  compute",
        "* as it is",
        "the speed of the network between slices is not known and not in these times; the order"
        " takes it for 10 GB/s of each device",
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
