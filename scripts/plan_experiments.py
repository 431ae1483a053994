"""Plan every named experiment on its target devices and print the plans as one table.

    python scripts/plan_experiments.py [--folder=runs/plans] [NAME …]

The summary of an experiment names its devices in parentheses, in the form of `--target`. An
experiment without a target uses `--otherwise` (h100). The script requires the compilers for TPUs
and GPUs (`pip install 'layerkit-runner[plan-tpu,plan-cuda]'`), but neither devices nor data. It
stores plans as JSON in the folder and reuses them. The exit code is 1 if a plan failed or does not
fit.
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

from layerkit_runner.config.registry import catalogue_json, list_experiments
from layerkit_runner.files.text import seconds_text, size_text

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
    """The result of planning an experiment.

    Attributes:
      target: Target devices in the form of `--target`.
      plan: Plan in JSON form; None if the command failed.
      error: Error output of the command if it failed.
      cpu_seconds: CPU time of the process on all cores.
      resident_bytes: Peak resident memory of the process.
      seconds: Wall-clock time.
    """

    target: str
    plan: Mapping[str, Any] | None
    error: str
    cpu_seconds: float
    resident_bytes: int
    seconds: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Plan the selected experiments, print the table and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", help="names of experiments (default: all)")
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/plans"), help="folder of the stored plans"
    )
    parser.add_argument("--otherwise", default="h100", help="target of experiments without one")
    options = parser.parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    made = {}
    for name, target in _targets(options.names, otherwise=options.otherwise):
        made[name] = _planned(name, target, options.folder)
        print(" ".join(_row(name, made[name])), file=sys.stderr, flush=True)
    print(_table(made))
    return 0 if all(each.plan and each.plan["fits"] for each in made.values()) else 1


def _targets(names: Sequence[str], *, otherwise: str) -> Iterator[tuple[str, str]]:
    """Yield the names of experiments and their targets.

    Aliases, experiments that require a folder of the user, and pure evaluations are skipped.
    """
    for entry in catalogue_json(list_experiments()):
        if names and entry["name"] not in names:
            continue
        summary = entry["summary"]
        if entry["num_params"] is None or summary.startswith("The same as "):
            continue
        if "eval_only" in entry["tags"]:
            continue
        result = _TARGET.search(summary)
        yield entry["name"], result[1] if result else otherwise


def _planned(name: str, target: str, folder: Path) -> Made:
    """Return the stored plan of an experiment, or run the plan command in a new process."""
    kept = folder / f"{name}.json"
    if kept.exists():
        return Made(**json.loads(kept.read_text()))
    command = [
        *(sys.executable, "-m", "layerkit_runner.cli", f"--exp={name}", "--mode=plan"),
        *(f"--target={target}", "--json"),
    ]
    begun = time.monotonic()
    printed, said = folder / f"{name}.out", folder / f"{name}.err"
    with printed.open("wb") as out, said.open("wb") as err:
        process = subprocess.Popen(command, stdout=out, stderr=err)
        # `os.wait4` reports the resources of this process, `process.wait` does not.
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
    """Return the table in Markdown."""
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
    """Return the MFU range from no overlap of communication to full overlap."""
    low, high = bounds.get("mfu_no_overlap"), bounds.get("mfu")
    if low is None or high is None:
        return ""
    ends = dict.fromkeys(f"{100 * share:.0f}" for share in (low, high))
    return f"{' to '.join(ends)} %"


if __name__ == "__main__":
    sys.exit(main())
