"""Compare the time from process start to the first printed loss with that of a bare program.

The runner and the bare program train a model of the quickstart's size. They alternate, with an
empty compilation cache (cold) and a filled one (warm). The output has medians in seconds, their
ratio, and the share of imports in the runner's time.

    python benchmarks/startup.py
    python benchmarks/startup.py --rounds 5
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
FIRST_LOSS = re.compile(r"\bloss \d")
IMPORTS = (
    "import layerkit_runner.cli, layerkit_runner.run.resolve, "
    "layerkit_runner.config.registry, "
    "layerkit_runner.run.training_run, layerkit_experiments.lm.quickstart"
)


def seconds_to_first_loss(command: Sequence[str], cache: str) -> float:
    """Return the seconds from the start of `command` to its first line with a loss; kill it."""
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": cache, "PYTHONUNBUFFERED": "1"}
    environment |= {
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
    }
    began = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if FIRST_LOSS.search(line):
            seconds = time.perf_counter() - began
            process.kill()
            process.wait()
            return seconds
    raise RuntimeError(f"{command} printed no loss:\n{''.join(lines)}")


def import_seconds() -> float:
    """Return the seconds of all imports of the runner before training."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", IMPORTS], check=True)
    return time.perf_counter() - began


def runner_command(folder: str) -> list[str]:
    """Return the command that runs the quickstart in `folder`."""
    runner = [sys.executable, "-m", "layerkit_runner.cli", "--exp=lm.quickstart.LocalText"]
    return [*runner, f"--job_log_dir={folder}"]


def measure(rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each program, cold and warm, over the rounds."""
    bare = [sys.executable, str(HERE / "bare.py")]
    seconds: dict[str, list[float]] = {}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as scratch:
            for state in ("cold", "warm"):
                # The second start of a program reads the compilation cache of its first start.
                for name in ("bare", "runner"):
                    job = tempfile.mkdtemp(dir=scratch)
                    command = bare if name == "bare" else runner_command(job)
                    taken = seconds_to_first_loss(command, f"{scratch}/cache_{name}")
                    seconds.setdefault(f"{name} {state}", []).append(taken)
        seconds.setdefault("runner imports", []).append(import_seconds())
    return seconds


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    seconds = measure(parser.parse_args().rounds)
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    for name, taken in seconds.items():
        print(f"{name:15} median {statistics.median(taken):6.2f} s  {[round(t, 2) for t in taken]}")
    for state in ("cold", "warm"):
        pairs = zip(seconds[f"runner {state}"], seconds[f"bare {state}"], strict=True)
        ratio = statistics.median(ours / bare for ours, bare in pairs)
        share = statistics.median(seconds["runner imports"]) / statistics.median(
            seconds[f"runner {state}"]
        )
        print(f"{state}: {ratio:.2f} times the bare program; imports {share:.0%} of the runner")


if __name__ == "__main__":
    main()
