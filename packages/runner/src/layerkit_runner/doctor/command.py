"""`runner doctor`: the checks in their order, one page, and an exit code.

    runner doctor                       this machine, and the folder where it is called
    runner doctor --job_log_dir=DIR     and the folder to write to, or gs://bucket/run
    runner doctor --json                for programs

Exit codes: 0 everything works, 1 something does not.
"""

from __future__ import annotations

import json
import os
import textwrap
import time
from collections.abc import Iterator, Sequence

from layerkit_runner.command_line.flags import RunOptions
from layerkit_runner.doctor import machine
from layerkit_runner.doctor.finding import Finding, Problem
from layerkit_runner.doctor.timed import run_group

# Seconds that each check may take, by the worker that does it. The first use of devices waits for
# their driver, and a slow compiler for attention.
LIMITS = {
    "storage": {"folder": 60.0, "compile cache": 30.0},
    "devices": {"devices": 120.0, "arithmetic": 90.0, "attention": 180.0, "collectives": 90.0},
}

_WIDTH = 100
_INDENT = 15


def run_doctor(options: RunOptions) -> int:
    """Looks at this machine and prints what it finds; returns the exit code."""
    began = time.monotonic()
    findings: dict[str, Finding] = {}
    for name, finding in _look(options):
        findings[name] = finding
        if not options.json:
            for line in finding_lines(name, finding):
                print(line, flush=True)
    problems = [problem for finding in findings.values() for problem in finding.problems]
    seconds = time.monotonic() - began
    if options.json:
        print(doctor_json(findings, seconds=seconds), flush=True)
    else:
        print("\n".join(problem_lines(problems, seconds=seconds)), flush=True)
    return 1 if any(problem.fails for problem in problems) else 0


def _look(options: RunOptions) -> Iterator[tuple[str, Finding]]:
    yield "packages", machine.check_packages()
    yield "host", machine.check_host()
    yield "launcher", machine.check_launcher(os.environ)
    yield "environment", machine.check_environment(os.environ)
    given = {
        "job_log_dir": options.job_log_dir,
        "jax_compilation_cache": options.jax_compilation_cache,
    }
    for group, limits in LIMITS.items():
        yield from run_group(group, limits, given)


def finding_lines(name: str, finding: Finding) -> Iterator[str]:
    """A finding for people: its name, and its lines beside it."""
    head = name
    for line in finding.lines:
        for part in textwrap.wrap(line, _WIDTH - _INDENT, subsequent_indent="  ") or [""]:
            yield f"{head:<{_INDENT}}{part}".rstrip()
            head = ""


def problem_lines(problems: Sequence[Problem], *, seconds: float) -> Iterator[str]:
    """The end of the page: what is wrong first, then what is good to know."""
    yield ""
    for fails, heading in ((True, "does not work"), (False, "good to know")):
        chosen = [problem for problem in problems if problem.fails is fails]
        if not chosen:
            continue
        yield heading
        for number, problem in enumerate(chosen, start=1):
            yield from _wrapped(f"{number}. {problem.what}", indent=5)
            yield from _wrapped(f"   → {problem.to_do}", indent=7)
        yield ""
    count = sum(problem.fails for problem in problems)
    verdict = "everything that was tried works" if not count else f"{count} thing(s) do not work"
    yield f"{verdict}; looked for {seconds:.0f} s"


def _wrapped(text: str, *, indent: int) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent="  ", subsequent_indent=" " * indent)


def doctor_json(findings: dict[str, Finding], *, seconds: float) -> str:
    """One JSON object: `checks`, by name their values; `problems`; `works`; `seconds`."""
    problems = [
        {"check": name, "what": problem.what, "to_do": problem.to_do, "fails": problem.fails}
        for name, finding in findings.items()
        for problem in finding.problems
    ]
    return json.dumps(
        {
            "checks": {name: finding.values for name, finding in findings.items()},
            "problems": problems,
            "works": not any(problem["fails"] for problem in problems),
            "seconds": round(seconds, 1),
        }
    )
