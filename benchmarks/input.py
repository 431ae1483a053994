"""Compare the examples per second of each reader with those of the plain library.

A reader and its rival (`input_rivals/`) alternate in one process on the same data, with the same
transforms, batch size, workers and prefetch. Their first batches are compared. The output has for
each reader: examples per second; the speed ratio (above 1: the reader is faster), by wall-clock
time as the median over the rounds with quartiles, and by CPU time of this process; bytes of its
state as JSON; and seconds to the first batch of both, with libraries imported and caches filled.
`--wait` prints the share of time that the quickstart's training waits for input instead.

    python benchmarks/input.py
    python benchmarks/input.py --readers TokenRecords GrainMapInput --rounds 60
    python benchmarks/input.py --wait
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

import numpy as np
from input_rivals.contest import BATCH_SIZE, EVAL_ROWS, LENGTH, Contest, fields_of_batch

from layerkit_inputs import BaseInput

SLICE_SECONDS = 0.2
STARTS, START_SECONDS = 5, 10.0
"""Limits of the start-up measurement: number of starts, and total seconds to begin another."""
SIDES = ("ours", "bare")


class Entry(NamedTuple):
    """The location of a contest and its requirements."""

    module: str
    function: str
    rival: str
    extra: str | None = None
    """Extra of layerkit-inputs that both sides need."""


CONTESTS = {
    "LocalText": Entry("numpy_loops", "local_text", "NumPy"),
    "LocalText, eval": Entry("numpy_loops", "local_text_evaluated", "NumPy"),
    "SyntheticInput": Entry("numpy_loops", "synthetic", "NumPy"),
    "Mixture": Entry("numpy_loops", "mixture", "NumPy"),
    "MultiInput": Entry("numpy_loops", "multi_input", "NumPy"),
    "TokenRecords": Entry("token_files", "token_records", "array_record, NumPy", "grain"),
    "ArrayRecordRows": Entry("grain_pipelines", "array_record_rows", "grain", "grain"),
    "GrainMapInput": Entry("grain_pipelines", "map_input", "grain", "grain"),
    "GrainMapInput, 4 threads": Entry("grain_pipelines", "map_input_on_threads", "grain", "grain"),
    "GrainMapInput, eval": Entry("grain_pipelines", "map_input_evaluated", "grain", "grain"),
    "GrainIterInput": Entry("grain_pipelines", "iter_input", "grain", "grain"),
    "GrainIterInput, eval": Entry("grain_pipelines", "iter_input_evaluated", "grain", "grain"),
    "GrainIterInput, 1 worker": Entry("grain_pipelines", "iter_input_by_worker", "grain", "grain"),
    "ParquetRows": Entry("grain_pipelines", "parquet_rows", "grain", "grain"),
    "HuggingFaceInput": Entry("hugging_face", "mapped_text", "datasets", "hf"),
    "HuggingFaceInput, eval": Entry("hugging_face", "mapped_text_evaluated", "datasets", "hf"),
    "HuggingFacePairs": Entry("hugging_face", "pairs", "datasets", "hf"),
    "HuggingFaceStream": Entry("hugging_face", "streamed_text", "datasets", "hf"),
    "SeqIOInput, packed": Entry("seqio_tasks", "packed", "seqio", "seqio"),
    "SeqIOInput": Entry("seqio_tasks", "unpacked", "seqio", "seqio"),
    "LingvoInputAdaptor": Entry("lingvo_generators", "generator", "lingvo", "lingvo"),
}
PACKAGES = (
    "numpy",
    "grain",
    "array_record",
    "datasets",
    "pyarrow",
    "seqio",
    "tensorflow",
    "lingvo",
)


class Turn(NamedTuple):
    """The time of one side in a round."""

    seconds: float
    cpu_seconds: float


class Figures(NamedTuple):
    """The measured figures of a reader."""

    examples_per_second: float
    ratios: list[float]
    cpu_ratio: float
    """Ratio of the CPU times, summed over all rounds."""
    state_bytes: int
    start_seconds: tuple[float, float]


class Side(NamedTuple):
    """A started reader or rival."""

    batches: Iterator[Any]
    close: Callable[[], None]


def start(contest: Contest, name: str) -> Side:
    """Start the side `ours` or `bare`."""
    if name == "bare":
        batches = contest.bare()
        return Side(batches, getattr(batches, "close", lambda: None))
    reader = contest.ours()
    return Side(endless(reader, contest), reader.close)


def endless(reader: BaseInput, contest: Contest) -> Iterator[Mapping[str, Any]]:
    """Yield the batches of a reader: its training stream, or repeated evaluation epochs."""
    while True:
        if contest.is_evaluation:
            yield from reader.eval_batches()
        else:
            yield reader.get_next()


def check_alike(contest: Contest) -> None:
    """Compare the fields, shapes and dtypes of the first batches, and values if `is_same_order`."""
    sides = [start(contest, name) for name in SIDES]
    # For an evaluation these include the padded end of the epoch and the next epoch.
    compared = 2 * EVAL_ROWS // BATCH_SIZE if contest.is_evaluation else 3
    batches = zip(*(side.batches for side in sides), strict=False)
    for left, right in itertools.islice(batches, compared):
        mine, other = fields_of_batch(left), fields_of_batch(right)
        if contest.renamed is not None:
            mine = {name: mine[name] for name in contest.renamed.values()}
            other = {name: other[old] for old, name in contest.renamed.items()}
        assert mine.keys() == other.keys(), (sorted(mine), sorted(other))
        for name, array in mine.items():
            assert array.shape == other[name].shape, (name, array.shape, other[name].shape)
            same_kind = array.dtype.kind == other[name].dtype.kind
            assert same_kind or contest.renamed, (name, array.dtype, other[name].dtype)
            if contest.is_same_order:
                np.testing.assert_array_equal(array, other[name], err_msg=name)
    for side in sides:
        side.close()


def take(batches: Iterator[Any], count: int) -> Turn:
    """Read `count` batches; return the wall-clock and CPU time."""
    began, cpu_began = time.perf_counter(), time.process_time()
    for _ in range(count):
        next(batches)
    return Turn(time.perf_counter() - began, time.process_time() - cpu_began)


def start_seconds(contest: Contest) -> tuple[float, float]:
    """Return the median seconds to the first batch of the reader and of the rival."""
    taken: dict[str, list[float]] = {name: [] for name in SIDES}
    while len(taken["bare"]) < STARTS and sum(map(sum, taken.values())) < START_SECONDS:
        for name in SIDES:
            began = time.perf_counter()
            side = start(contest, name)
            next(side.batches)
            taken[name].append(time.perf_counter() - began)
            side.close()
    return statistics.median(taken["ours"]), statistics.median(taken["bare"])


def measure(contest: Contest, rounds: int) -> Figures:
    """Measure both sides in alternating order."""
    check_alike(contest)
    started = start_seconds(contest)
    reader = contest.ours()
    bare = start(contest, "bare")
    sides = {"ours": endless(reader, contest), "bare": bare.batches}
    count = contest.least_batches
    while max(take(batches, count).seconds for batches in sides.values()) < SLICE_SECONDS:
        count *= 2
    turns: dict[str, list[Turn]] = {name: [] for name in SIDES}
    for number in range(rounds):
        for name in SIDES if number % 2 else reversed(SIDES):
            turns[name].append(take(sides[name], count))
    state_bytes = len(json.dumps(reader.get_state()))
    reader.close()
    bare.close()
    cpu = {name: sum(turn.cpu_seconds for turn in taken) for name, taken in turns.items()}
    pairs = list(zip(turns["ours"], turns["bare"], strict=True))
    return Figures(
        examples_per_second=count
        * BATCH_SIZE
        / statistics.median(turn.seconds for turn in turns["ours"]),
        ratios=[theirs.seconds / ours.seconds for ours, theirs in pairs],
        cpu_ratio=cpu["bare"] / cpu["ours"],
        state_bytes=state_bytes,
        start_seconds=started,
    )


def line_of(name: str, rival: str, figures: Figures) -> str:
    """Return a line of the table."""
    low, middle, high = statistics.quantiles(figures.ratios, n=4)
    ours, bare = figures.start_seconds
    return (
        f"{name:26} {rival:20} {figures.examples_per_second:9.0f}   "
        f"{middle:5.2f} ({low:.2f} to {high:.2f})   {figures.cpu_ratio:5.2f}   "
        f"{figures.state_bytes:7d}   {ours:6.3f} / {bare:.3f}"
    )


def run_contest(name: str, rounds: int) -> str:
    """Measure one reader and return its line, or the reason why it is skipped."""
    entry = CONTESTS[name]
    try:
        module = importlib.import_module(f"input_rivals.{entry.module}")
    except ImportError as error:
        how = f"pip install 'layerkit-inputs[{entry.extra}]'"
        if entry.extra == "lingvo":
            how += " and scripts/install_lingvo.py"
        return f"{name:26} skipped ({error}): {how}"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        contest = getattr(module, entry.function)(Path(folder))
        return line_of(name, entry.rival, measure(contest, rounds))


def print_wait(steps: int) -> None:
    """Train the quickstart and print the share of time that it waited for input."""
    with tempfile.TemporaryDirectory() as folder:
        runner = [sys.executable, "-m", "layerkit_runner.cli", "--exp=lm.quickstart.LocalText"]
        fields = [f"--fdl.MAX_STEPS={steps}", "--fdl.WARMUP_STEPS=10"]
        command = [*runner, f"--job_log_dir={folder}", *fields]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        (metrics,) = Path(folder).rglob("metrics.jsonl")
        records = [json.loads(line) for line in metrics.read_text().splitlines()]
    waits = [record["input_wait"] for record in records if "input_wait" in record]
    times = [record["step_time"] for record in records if "step_time" in record]
    print(
        f"{steps} steps of {1e3 * statistics.median(times):.1f} ms (median): waited for input "
        f"{statistics.mean(waits):.2%} of the time, at most {max(waits):.2%} of a summary interval"
    )


def versions(names: Sequence[str]) -> str:
    """Return the versions of the installed packages among `names`."""
    result = {}
    for name in names:
        try:
            result[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(f"{name} {version}" for name, version in result.items())


def parse_args() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--readers", nargs="+", metavar="NAME", help="names or prefixes of names")
    parser.add_argument("--rounds", type=int, default=30, help="number of measured rounds")
    parser.add_argument(
        "--wait", action="store_true", help="only measure how long a training step waits for input"
    )
    parser.add_argument("--wait_steps", type=int, default=200, help="training steps of --wait")
    args = parser.parse_args()
    prefixes = args.readers or list(CONTESTS)
    args.names = [n for n in CONTESTS if any(n.startswith(begin) for begin in prefixes)]
    if not args.names:
        parser.error(f"--readers {prefixes}: expected prefixes of {list(CONTESTS)}")
    return args


def main() -> None:
    """Measure and print."""
    args = parse_args()
    cores = os.cpu_count()
    print(f"{platform.machine()}, {cores} cores, Python {platform.python_version()}")
    print(versions(PACKAGES))
    if args.wait:
        print_wait(args.wait_steps)
        return
    print(f"batches of {BATCH_SIZE} rows of {LENGTH} tokens, {args.rounds} rounds")
    print(
        f"{'reader':26} {'rival':20} examples/s   speed (quartiles)       by CPU     state   "
        "start-up s: ours / rival"
    )
    for name in args.names:
        print(run_contest(name, args.rounds), flush=True)


if __name__ == "__main__":
    main()
