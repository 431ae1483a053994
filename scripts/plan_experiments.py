"""Plans every named experiment on the devices that it is made for, and prints them as one table.

    python scripts/plan_experiments.py [--folder=runs/plans] [NAME …]

The devices are those that the summary of an experiment names in parentheses, as `--target` takes
them; one that runs on any is planned for `--otherwise` (h100). Needs the compilers of TPUs and GPUs
(`pip install 'layerkit-runner[plan-tpu,plan-cuda]'`), and neither devices nor data. Plans are kept
as JSON in the folder, and those that are there are not made again. Exit code 1: one of them failed,
or does not fit.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from layerkit_runner.config.catalogue import catalogue_json
from layerkit_runner.config.registry import list_experiments
from layerkit_runner.files.byte_sizes import size_text
from layerkit_runner.tools.plan.page import seconds_text

_TARGET = re.compile(r"\(((?:v\d\w*:[\dx]+(?:\*\d+)?)|(?:[abh]\d+x\d+))\)")
_HEADER = (
    "experiment",
    "target",
    "peak of memory",
    "bound by",
    "MFU",
    "to other slices or nodes",
    "planned in",
)


@dataclasses.dataclass(frozen=True)
class Made:
    """What came of planning an experiment.

    Attributes:
      target: As `--target` takes it.
      plan: The JSON form; None where it failed.
      error: What the command said then.
      cpu_seconds: Of the process, on all cores.
      resident_bytes: The most that it had in memory.
      seconds: On the clock.
    """

    target: str
    plan: Mapping[str, Any] | None
    error: str
    cpu_seconds: float
    resident_bytes: int
    seconds: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Plans what is asked for, prints the table, and returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", help="experiments; all of them by default")
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/plans"), help="where the JSON goes"
    )
    parser.add_argument("--otherwise", default="h100", help="target of those that run on any")
    options = parser.parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    made = {}
    for name, target in _targets(options.names, otherwise=options.otherwise):
        made[name] = _planned(name, target, options.folder)
        print(" ".join(_row(name, made[name])), file=sys.stderr, flush=True)
    print(_table(made))
    return 0 if all(each.plan and each.plan["fits"] for each in made.values()) else 1


def _targets(names: Sequence[str], *, otherwise: str) -> Iterator[tuple[str, str]]:
    """Experiments and their targets.

    Left out are second names of others, what needs a folder of the user's, and what only evaluates.
    """
    for entry in catalogue_json(list_experiments()):
        if names and entry["name"] not in names:
            continue
        summary = entry["summary"]
        if entry["num_params"] is None or summary.startswith("The same as "):
            continue
        if "eval_only" in entry["tags"]:
            continue
        found = _TARGET.search(summary)
        yield entry["name"], found[1] if found else otherwise


def _planned(name: str, target: str, folder: Path) -> Made:
    """The plan of an experiment, made in a process of its own where it is not in the folder."""
    kept = folder / f"{name}.json"
    if kept.exists():
        return Made(**json.loads(kept.read_text()))
    command = [
        *(sys.executable, "-m", "layerkit_runner.cli", f"--exp={name}", "--mode=plan"),
        *(f"--target={target}", "--json", "--max_compilations=0"),
    ]
    begun = time.monotonic()
    printed, said = folder / f"{name}.out", folder / f"{name}.err"
    with printed.open("wb") as out, said.open("wb") as err:
        process = subprocess.Popen(command, stdout=out, stderr=err)
        # Not `process.wait`, which does not tell what this one process used.
        _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    made = Made(
        target=target,
        plan=json.loads(printed.read_text()) if process.returncode == 0 else None,
        error="" if process.returncode == 0 else said.read_text()[-2000:],
        cpu_seconds=used.ru_utime + used.ru_stime,
        resident_bytes=used.ru_maxrss * 1024,
        seconds=time.monotonic() - begun,
    )
    if made.plan is not None:
        kept.write_text(json.dumps(dataclasses.asdict(made)))
    printed.unlink()
    return made


def _table(made: Mapping[str, Made]) -> str:
    """In Markdown."""
    rows = [_HEADER, ("---",) * len(_HEADER), *(_row(name, each) for name, each in made.items())]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _row(name: str, made: Made) -> tuple[str, ...]:
    used = f"{made.cpu_seconds:.0f} s, {size_text(made.resident_bytes)}"
    plan = made.plan
    if plan is None:
        words = made.error.strip().splitlines() or ["failed"]
        return f"`{name}`", f"`{made.target}`", "failed", words[-1], "", "", used
    device, bounds, peak = plan["device"], plan["bounds"] or {}, plan["memory"]["peak"]
    usable = (device["memory_bytes"] or 0) - device["reserved_bytes"]
    of = f"{size_text(peak)} of {size_text(usable)}"
    slow = sum(traffic["bytes_slow"] for traffic in plan["collectives"])
    return (
        f"`{name}`",
        f"`{made.target}`",
        of if plan["fits"] else f"**does not fit**: {of}",
        _bound(bounds),
        _share(bounds),
        size_text(slow) if plan["num_slices"] > 1 else "",
        used,
    )


def _bound(bounds: Mapping[str, Any]) -> str:
    seconds = bounds.get("step_seconds")
    return "" if seconds is None else f"{bounds['limited_by']}, {seconds_text(seconds)}"


def _share(bounds: Mapping[str, Any]) -> str:
    """MFU where nothing of what is sent hides behind arithmetic, and where all does."""
    low, high = bounds.get("mfu_no_overlap"), bounds.get("mfu")
    if low is None or high is None:
        return ""
    ends = dict.fromkeys(f"{100 * share:.0f}" for share in (low, high))
    return f"{' to '.join(ends)} %"


if __name__ == "__main__":
    sys.exit(main())
