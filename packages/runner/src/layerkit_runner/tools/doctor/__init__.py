"""`runner doctor`: one page on versions, memory, disk, devices and collectives of this machine.

    runner doctor                       this machine and the current folder
    runner doctor --job_log_dir=DIR     this machine and the folder of a job, or gs://bucket/run
    runner doctor --json                the same as one JSON object

A check that uses a disk or a device runs in a separate process with a time limit: a hanging driver
cannot be interrupted from Python, and a wrong flag of XLA ends its process. `machine.py` has the
checks that need no JAX, and the entry point of these processes. `devices.py` has the others.

Exit codes: 0 if every check passed, 1 if one failed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator, Sequence

from layerkit_runner.config.flags import RunOptions
from layerkit_runner.tools.doctor.machine import Finding, Problem, check_host, check_packages

# Seconds. The first use of devices waits for their driver.
TIME_LIMITS = {"folder": 60.0, "devices": 150.0, "collectives": 150.0}
_REMEDIES_IF_HANGING = {
    "folder": "A network file system may be unreachable. Choose another --job_log_dir.",
    "devices": "Another program may hold the devices (only one process at a time can use a TPU), or"
    " the driver is stuck. On a slice of several hosts run `runner doctor` on all of them at once.",
    "collectives": "The devices compute but do not reach each other. For NVIDIA GPUs set"
    " NCCL_DEBUG=INFO and read its output, and try NCCL_P2P_DISABLE=1; for simulated CPU devices"
    " set NPROC to a number well above theirs.",
}
_INDENT = " " * 15
_CODE = f"import sys; from {__name__}.machine import main; main(*sys.argv[1:])"
# Lines of a stack trace from compiled code.
_FRAME = re.compile(r"\s*(@|#\d+)\s+0x|\*\*\* ")


def run_doctor(options: RunOptions) -> int:
    """Check this machine, print the page or the JSON object, and return the exit code."""
    began = time.monotonic()
    findings: dict[str, Finding] = {}
    for name, finding in run_checks(options.job_log_dir or "."):
        findings[name] = finding
        for line in () if options.json else finding.lines:
            heading = name if line is finding.lines[0] else ""
            print(textwrap.fill(f"{heading:<13}{line}", 100, subsequent_indent=_INDENT), flush=True)
    problems = [(name, problem) for name, found in findings.items() for problem in found.problems]
    fails = any(problem.fails for _, problem in problems)
    seconds = round(time.monotonic() - began, 1)
    if options.json:
        checks = {name: finding.values for name, finding in findings.items()}
        records = [{"check": name, **problem._asdict()} for name, problem in problems]
        record = {"checks": checks, "problems": records, "works": not fails, "seconds": seconds}
        print(json.dumps(record), flush=True)
        return 1 if fails else 0
    for _, problem in sorted(problems, key=lambda each: not each[1].fails):
        text = f"{'FAILS' if problem.fails else 'warning'}: {problem.what}"
        print("", textwrap.fill(text, 100, subsequent_indent="  "), sep="\n")
        print(textwrap.fill(f"  → {problem.to_do}", 100, subsequent_indent="    "))
    print(f"\n{'some checks failed' if fails else 'every check passed'}, in {seconds:.0f} s")
    return 1 if fails else 0


def run_checks(folder: str) -> Iterator[tuple[str, Finding]]:
    """Run the checks, and yield name and finding of each when it is done."""
    yield "packages", check_packages()
    yield "host", check_host()
    for name, limit in TIME_LIMITS.items():
        finding = run_in_process(name, folder, limit=limit)
        yield name, finding
        if name == "devices" and any(problem.fails for problem in finding.problems):
            return  # collectives would fail too


def run_in_process(
    name: str, folder: str, *, limit: float, command: Sequence[str] = (sys.executable, "-c", _CODE)
) -> Finding:
    """Run a check in a separate process and return its finding.

    Args:
      name: Key of `TIME_LIMITS`.
      folder: Argument of the check `folder`.
      limit: Seconds after which the process is killed.
      command: Command line, without name and folder, that prints the finding as JSON.
    """
    # Other programs may need the memory of the devices.
    environ = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", **os.environ}
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        words = [*command, name, folder]
        process = subprocess.Popen(words, stdout=stdout, stderr=stderr, env=environ)
        try:
            code = process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            problem = Problem(f"{name}: no answer within {limit:g} s.", _REMEDIES_IF_HANGING[name])
            return Finding(["does not answer"], {}, [problem])
        finally:
            process.kill()
            # A process that waits inside the kernel cannot be killed and is left behind.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=5)
        stdout.seek(0)
        stderr.seek(0)
        text = stdout.read().decode(errors="replace")
        lines = stderr.read().decode(errors="replace").splitlines()
    if code == 0 and text:
        found, values, problems = json.loads(text)
        return Finding(found, values, [Problem(*problem) for problem in problems])
    errors = [line.strip() for line in lines if line.strip() and not _FRAME.match(line)]
    problem = Problem(
        f"{name}: the process ended with exit code {code}: {' '.join(errors[-4:])}",
        "Check XLA_FLAGS and LIBTPU_INIT_ARGS, and the version of the driver.",
    )
    return Finding(["failed, see below"], {}, [problem])
