"""Speed and memory of a training run, and its goodput: the share of the time spent in steps.

Rates of completed steps start at the end of the first step, which includes compilation. They
exclude the time of other phases, such as an evaluation or a blocking save.

Goodput is the wall-clock accounting of a job by phase, over all its runs. The phases of the main
thread add up to the elapsed time. The goodput is the share of `steps`:

    start        before the first step: building, restoring, opening the data
    compile      tracing and compiling the training step
    input_wait   idle devices for lack of a batch
    save         waiting for a checkpoint (writing continues in the background)
    eval, decode including the compilation of their steps
    profile      starting, stopping and writing a trace
    lost         steps that were repeated, by a later run or after a rollback
    other        everything else, such as the report at the end

Time between two runs is counted separately, since the job may have been paused on purpose.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import operator
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from etils import epath

from layerkit_runner.files.atomic_write import atomic_write, read_regular
from layerkit_runner.observers.base import Background, Observer, RunInfo


@dataclasses.dataclass(frozen=True)
class StepWork:
    """The work of one training step, which may differ between training programs."""

    examples: float
    tokens: float
    flops: float | None


class Throughput:
    """A counter of completed steps and of the time between them.

    Attributes:
      goodput: Clock of the phases, of which `steps` and `input_wait` are the time of steps.
    """

    def __init__(self, info: RunInfo, goodput: Goodput) -> None:
        """Start without steps."""
        self.goodput = goodput
        self._info = info
        self._usual = StepWork(info.examples_per_step, info.tokens_per_step, info.flops_per_step)
        self._mark: tuple[int, float, float] | None = None  # newest step, its time, waits before it
        self._total = _Counts()

    def completed(self, step: int, work: StepWork | None = None) -> None:
        """Count a step that has just ended on the device, with its work or that of `info`.

        A step that ends within another phase is not counted, since it shared its time with that.
        """
        by_phase = self.goodput.seconds()
        waited = by_phase["input_wait"]
        now = by_phase["steps"] + waited
        last, began, waited_before = self._mark or (step, now, waited)
        # After a rollback, the step is an earlier one.
        if step > last and self.goodput.current_phase == "steps":
            work, steps = work or self._usual, step - last
            more = _Counts(
                steps=steps,
                seconds=now - began,
                input_wait=waited - waited_before,
                examples=steps * work.examples,
                tokens=steps * work.tokens,
                flops=steps * (work.flops or 0.0),
            )
            self._total = _Counts(*map(operator.add, self._total, more))
        self._mark = (step, now, waited)

    def rates_since_asked(self) -> Callable[[], dict[str, float]]:
        """Return a function that returns the rates since its last call, the first time since now.

        They are fractions, seconds and 1e12 model FLOPs, as the names say; unknown ones are left
        out.
        """
        last = self._total

        def rates() -> dict[str, float]:
            nonlocal last
            before, last = last, self._total
            return _rates(self._info, _Counts(*map(operator.sub, last, before)))

        return rates

    def overall(self) -> dict[str, float]:
        """Return the rates over all timed steps of this run."""
        return _rates(self._info, self._total)


class _Counts(NamedTuple):
    """Work done in `seconds`, which include `input_wait` seconds of waiting for data."""

    steps: float = 0
    seconds: float = 0.0
    input_wait: float = 0.0
    examples: float = 0.0
    tokens: float = 0.0
    flops: float = 0.0


def _rates(info: RunInfo, done: _Counts) -> dict[str, float]:
    if done.steps <= 0 or done.seconds <= 0:
        return {}
    rates = {
        "step_time": done.seconds / done.steps,
        "steps_per_sec": done.steps / done.seconds,
        "input_wait": min(1.0, done.input_wait / done.seconds),
        "examples_per_sec": done.examples / done.seconds,
    }
    if done.tokens > 0:
        rates["tokens_per_sec"] = done.tokens / done.seconds
    if info.flops_per_step is not None:
        flops_per_sec_per_device = done.flops / done.seconds / info.num_devices
        rates["tflops_per_sec_per_device"] = flops_per_sec_per_device / 1e12
        if info.peak_flops_per_device is not None:
            rates["mfu"] = flops_per_sec_per_device / info.peak_flops_per_device
    return rates


def memory_scalars() -> dict[str, float]:
    """Return the bytes in use by name, without unknown ones.

    `memory/device_…` are the maximum over the devices of this process, unknown for CPUs, and
    `memory/host_rss_bytes` is the resident memory of this process, known on systems with /proc.
    """
    import jax  # importing the observers does not load it

    scalars = {}
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    for name in ("bytes_in_use", "peak_bytes_in_use"):
        known = [device[name] for device in stats if name in device]
        if known:
            scalars[f"memory/device_{name}"] = float(max(known))
    with contextlib.suppress(OSError), open("/proc/self/statm", "rb") as statm:
        pages = int(statm.read().split()[1])
        scalars["memory/host_rss_bytes"] = float(pages * os.sysconf("SC_PAGE_SIZE"))
    return scalars


# Dense (no structured sparsity) bfloat16 FLOP/s of one JAX device, float16 for V100 and T4. Vendors
# print double that for GPUs since Ampere, with sparsity. If a TPU chip is two JAX devices, each has
# half. The first pattern that matches the whole device kind applies, so variants come first.
_TERA = 1e12
_PEAKS: tuple[tuple[str, float | None], ...] = (
    # Cloud TPU documentation, "Peak compute per chip (bf16)", one page per version.
    # A v2 or v3 chip (45, 123 TFLOP/s) is two devices; so is a TPU7x chip (2307).
    (r"TPU v2", 22.5 * _TERA),
    (r"TPU v3", 61.5 * _TERA),
    # TPU v4i: Jouppi et al., "Ten Lessons From Three Generations", 2021.
    (r"TPU v4 lite", 138 * _TERA),
    (r"TPU v4", 275 * _TERA),
    (r"TPU v5 lite|TPU v5e", 197 * _TERA),
    (r"TPU v5|TPU v5p", 459 * _TERA),
    (r"TPU v6 lite|TPU v6e", 918 * _TERA),
    (r"TPU7x", 2307 / 2 * _TERA),
    # NVIDIA data sheets and architecture white papers of each product. The peak of a slice of a
    # partitioned GPU (MIG) is unknown.
    (r".*\bMIG\b.*", None),
    (r".*\b(GB300|GB200)\b.*", 2500 * _TERA),
    (r".*\b(B300|B200)\b.*", 2250 * _TERA),
    (r".*\b(H200 NVL|H100 NVL)\b.*", 835.5 * _TERA),
    (r".*\bH100 PCIe\b.*", 756 * _TERA),
    (r".*\b(GH200|H200|H100)\b.*", 989.4 * _TERA),
    (r".*\bA100\b.*", 312 * _TERA),
    (r".*\bL40S\b.*", 362 * _TERA),
    (r".*\bL4\b.*", 121 * _TERA),
    (r".*\bV100\b.*", 125 * _TERA),  # float16
    (r".*\bT4\b.*", 65 * _TERA),  # float16
)


def peak_flops(device_kind: str) -> float | None:
    """Return the dense bfloat16 FLOP/s of one device, or None if unknown, as for CPUs.

    Args:
      device_kind: Value of `jax.Device.device_kind`.

    >>> peak_flops('NVIDIA H100 80GB HBM3')
    989400000000000.0
    >>> peak_flops('cpu') is None
    True
    """
    matches = (peak for pattern, peak in _PEAKS if re.fullmatch(pattern, device_kind))
    return next(matches, None)


PHASES = (
    *("steps", "compile", "input_wait", "save", "eval", "decode", "profile"),
    *("start", "lost", "other"),
)
_SECONDS_BETWEEN_WRITES = 30.0


class Goodput:
    """A clock that splits time into phases; a nested phase interrupts the one around it.

    Attributes:
      num_steps: Number of completed steps whose time is in `steps`.
      num_lost_steps: Number of steps that were repeated after a resume or a rollback.
      seconds_between_runs: Time from the last record of a run to the start of the next.
      num_runs: Number of runs of this job, including this one.
    """

    def __init__(self, *, clock: Callable[[], float] = time.perf_counter) -> None:
        """Start the phase `start`; `clock` returns seconds."""
        self._clock = clock
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._earlier_runs: list[dict[str, float]] = []
        self._stack = ["start"]
        self._mark = clock()
        self.num_steps = 0
        self.num_lost_steps = 0
        self.seconds_between_runs = 0.0
        self.num_runs = 1

    @property
    def current_phase(self) -> str:
        """Name of the current phase."""
        return self._stack[-1]

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time of the `with` block as `name`, one of `PHASES`."""
        self._count()
        self._stack.append(name)
        try:
            yield
        finally:
            self._count()
            self._stack.pop()

    def outermost(self, name: str) -> None:
        """Count time outside all `with` blocks as `name` from now on."""
        self._count()
        self._stack[0] = name

    def moved(self, name: str, seconds: float) -> None:
        """Count the last `seconds` of the current phase as `name` instead."""
        self._seconds[self._stack[-1]] -= seconds
        self._seconds[name] += seconds

    def seconds(self) -> dict[str, float]:
        """Return the seconds by phase, up to now."""
        self._count()
        return dict(self._seconds)

    def shares(self) -> dict[str, float]:
        """Return the share of each phase that is not empty, by `goodput/<phase>`."""
        seconds = self.seconds()
        total = max(sum(seconds.values()), 1e-9)
        return {f"goodput/{name}": value / total for name, value in seconds.items() if value > 0}

    def add_earlier(
        self, record: Mapping[str, Any], *, start_step: int, seconds_between: float
    ) -> None:
        """Add the `record()` of earlier runs of the job."""
        done = record["num_steps"]
        lost = min(done, max(0, record["step"] - start_step))
        for name in PHASES:
            self._seconds[name] += record["seconds"].get(name, 0.0)
        self.num_steps += done
        lost_seconds = self.lose_steps(lost)
        self._earlier_runs = [dict(run) for run in record.get("runs", [record["seconds"]])]
        for run in reversed(self._earlier_runs):
            moved = min(run["steps"], lost_seconds)
            run["steps"], run["lost"] = run["steps"] - moved, run["lost"] + moved
            lost_seconds -= moved
        self.num_lost_steps += record["num_lost_steps"]
        self.num_runs += record["num_runs"]
        self.seconds_between_runs += record["seconds_between_runs"] + max(0.0, seconds_between)

    def lose_steps(self, count: int) -> float:
        """Count the last steps, and their share of the time of steps, as lost; return the time."""
        lost = min(count, self.num_steps)
        seconds = self.seconds()["steps"] * lost / max(self.num_steps, 1)
        self._seconds["steps"] -= seconds
        self._seconds["lost"] += seconds
        self.num_steps -= lost
        self.num_lost_steps += lost
        return seconds

    def record(self) -> dict[str, Any]:
        """Return all counts as JSON values; `runs` has the seconds of each run by phase."""
        seconds = {name: round(value, 3) for name, value in self.seconds().items()}
        before = {name: sum(run.get(name, 0.0) for run in self._earlier_runs) for name in PHASES}
        newest = {name: round(value - before[name], 3) for name, value in seconds.items()}
        return {
            "seconds": seconds,
            "runs": [*self._earlier_runs, newest],
            "num_steps": self.num_steps,
            "num_lost_steps": self.num_lost_steps,
            "num_runs": self.num_runs,
            "seconds_between_runs": round(self.seconds_between_runs, 3),
        }

    def summary(self) -> str:
        """Return `goodput: 91.2 % of 1:02:03 in steps; compile 4.0 %, …`."""
        shares = self.shares()
        total = sum(self.seconds().values())
        rest = [
            f"{name.removeprefix('goodput/')} {share:.1%}"
            for name, share in sorted(shares.items(), key=lambda item: -item[1])
            if name != "goodput/steps" and share >= 0.0005
        ]
        text = f"goodput: {shares.get('goodput/steps', 0.0):.1%} of {_clock_text(total)} in steps"
        if rest:
            text += f"; {', '.join(rest)}"
        if self.num_runs > 1:
            text += f"; {self.num_runs} runs, {_clock_text(self.seconds_between_runs)} between them"
        if self.num_lost_steps:
            word = "step" if self.num_lost_steps == 1 else "steps"
            text += f", {self.num_lost_steps} {word} repeated"
        return text

    def _count(self) -> None:
        now = self._clock()
        self._seconds[self._stack[-1]] += now - self._mark
        self._mark = now


class GoodputLog(Observer):
    """An observer that records the goodput of a training job, over all its runs, in goodput.json.

    The file is written in the background, every 30 seconds, with each save and at the end. The
    hooks run on the main thread, whose time they read.
    """

    in_background = False

    def __init__(self, goodput: Goodput, *, clock: Callable[[], float] = time.time) -> None:
        """Store the goodput to record; `clock` returns Unix time in seconds."""
        self._goodput = goodput
        self._clock = clock
        self._background = Background()
        self._path: epath.Path | None = None
        self._step = 0
        self._last_write = clock()

    def start(self, info: RunInfo) -> None:
        """Add the record of earlier runs, and write the first one."""
        if info.job_log_dir is None or info.mode != "train":
            return
        self._step = info.start_step
        path = info.job_log_dir / "goodput.json"
        if path.exists():
            record = json.loads(read_regular(path))
            began = self._clock() - sum(self._goodput.seconds().values())
            self._goodput.add_earlier(
                record, start_step=info.start_step, seconds_between=began - record["time"]
            )
        self._path = path
        self.flush()

    def progress(self, step: int) -> None:
        """Count the step, and write the record every 30 seconds."""
        self._step = step
        self._goodput.num_steps += 1
        if self._clock() - self._last_write >= _SECONDS_BETWEEN_WRITES:
            self.flush()

    def rollback(self, step: int, facts: Mapping[str, float]) -> None:
        """Count the steps after `step` as lost."""
        del facts
        self._goodput.lose_steps(self._step - step)
        self._step = step

    def flush(self) -> None:
        """Start writing the record."""
        if self._path is not None:
            self._last_write = self._clock()
            head = {"step": self._step, "time": round(self._last_write, 3)}
            text = json.dumps({**head, **self._goodput.record()}, indent=2) + "\n"
            self._background.submit(atomic_write, self._path, text)

    def close(self) -> None:
        """Write the last record."""
        try:
            self.flush()
        finally:
            self._path = None
            self._background.close()


def _clock_text(seconds: float) -> str:
    return str(datetime.timedelta(seconds=round(seconds)))
