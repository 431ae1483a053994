"""Measure the training speed and memory use of GPT-3 shapes on NVIDIA GPUs and TPUs.

The sweep covers the dtype of matrix products, attention backends, remat policies, and rows per
device, which are doubled until the memory is full. Each case runs in its own process
(`accelerator_case.py`), so no case inherits memory from another. Its line is printed, and appended
to `--json`, as soon as the case ends. A case that does not fit, is not supported or fails gets a
line, too.

    python benchmarks/accelerators.py --quick --json=quick.jsonl       # six cases
    python benchmarks/accelerators.py --models=126m,1.3b --remat=none,full --rows=8..
    python benchmarks/accelerators.py --devices=8 --models=5b          # shard over 8 devices
    python benchmarks/accelerators.py --compile_only --target=h100         # without a GPU
    python benchmarks/accelerators.py --compile_only --target=v5p:2x2x1    # without TPUs

MFU is relative to the dense bfloat16 peak, also for 8-bit products. It counts model FLOPs only:
half of the attention matrix if causal, and no rematerialized operations.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from accelerator_case import DTYPES, MODELS, Case

from layerkit.errors import near_names
from layerkit.ops.attention.backends import BACKEND_NAMES
from layerkit.ops.remat import REMAT_POLICIES
from layerkit_runner.distributed.devices import set_gpu_memory_share

_FOLDER = Path(__file__).parent
_MOST_ROWS = 4096
_QUICK = {
    "models": ["126m"],
    "dtypes": ["bf16", "fp8_delayed"],
    "backends": ["cudnn", "pallas", "xla"],
    "remat": ["none"],
    "rows": [8],
    "groups": 5,
}

_GIGA = 1e9
_CASE_COLUMNS = f"{'model':<6}{'dtype':<13}{'attention':<15}{'remat':<15}{'rows':>5}"
_COMPILED_COLUMNS = (
    f"{'peak GB':>9}{'state GB':>10}{'temporary GB':>14}{'copied GB':>15}{'8-bit products':>16}"
    f"{'least ms':>10}{'compiler s':>12}"
)
_MEASURED_COLUMNS = (
    f"{'ms':>8}{'quartiles':>17}{'tokens/s':>10}{'TFLOP/s':>9}{'MFU':>8}{'peak GB':>9}"
    f"{'predicted':>11}{'8-bit products':>16}{'loss':>8}"
)


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """Return the options, and the experiment overrides such as `--fdl.MAX_SEQ_LEN=4096`."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog="Fields of the experiment: --fdl.NAME=VALUE",
        allow_abbrev=False,
    )
    listed = {
        "--models": (list(MODELS), list(MODELS)),
        "--dtypes": (list(DTYPES), ["bf16", "fp8_delayed"]),
        "--backends": (list(BACKEND_NAMES), ["cudnn", "pallas", "xla"]),
        "--remat": (list(REMAT_POLICIES), ["none", "dots_no_batch", "full"]),
    }
    for flag, (names, default) in listed.items():
        parser.add_argument(
            flag, type=_names(names), default=default, help=f"comma-separated: {', '.join(names)}"
        )
    parser.add_argument(
        "--rows",
        type=_rows,
        default=_rows("1.."),
        help="rows per device: 8, 4,16, 4..64 (doubled), or 4.. (doubled until memory is full)",
    )
    parser.add_argument("--devices", type=int, default=1, help="number of devices to shard over")
    parser.add_argument("--packed", action="store_true", help="pack several documents in a row")
    parser.add_argument("--steps", type=int, default=10, help="training steps per timed group")
    parser.add_argument("--groups", type=int, default=9, help="number of timed groups")
    parser.add_argument(
        "--quick", action="store_true", help="change the defaults to 126m, 8 rows, no remat"
    )
    parser.add_argument(
        "--compile_only", action="store_true", help="compile for --target; needs no device"
    )
    parser.add_argument(
        "--target",
        default=None,
        help="devices of --compile_only: h100 (default), a100, h200, b200, or v5p:2x2x1",
    )
    parser.add_argument("--json", type=Path, help="file that gets a line of JSON for each case")
    parser.add_argument("--case_seconds", type=int, default=1800, help="time limit of a case")
    if "--quick" in sys.argv[1:]:
        parser.set_defaults(**_QUICK)
    args, overrides = parser.parse_known_args()
    for each in overrides:
        if not each.startswith("--fdl.") or "=" not in each:
            parser.error(f"unknown option {each}. Experiment fields are set by --fdl.NAME=VALUE.")
    for field in ("devices", "steps", "case_seconds"):
        if getattr(args, field) < 1:
            parser.error(f"--{field}={getattr(args, field)}: expected at least 1")
    if args.groups < 2:
        parser.error(f"--groups={args.groups}: expected at least 2, to compute quartiles")
    if args.target is not None and not args.compile_only:
        parser.error(f"--target={args.target} requires --compile_only")
    if args.compile_only and args.target is None:
        args.target = "h100"
    return args, overrides


def _names(known: Sequence[str]) -> Any:
    def read(text: str) -> list[str]:
        names = text.split(",")
        for name in names:
            if name not in known:
                hint = near_names(name, known)
                raise argparse.ArgumentTypeError(f"{name!r}{hint} Known: {', '.join(known)}")
        return names

    return read


def _rows(text: str) -> list[int]:
    """Return the row counts of `8`, `4,16`, `4..64` or `4..`."""
    first, dots, last = text.partition("..")
    try:
        if not dots:
            rows = sorted(int(each) for each in text.split(","))
        else:
            most = int(last) if last else _MOST_ROWS
            doubled = (int(first) * 2**power for power in itertools.count())
            rows = list(itertools.takewhile(lambda each: 0 < each <= most, doubled))
    except ValueError:
        rows = []
    if not rows or rows[0] < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a form such as 8, 4,16, 4..64 or 4..")
    return rows


def run(script: str, arguments: Sequence[str], *, seconds: int) -> dict[str, Any]:
    """Run a script of this folder in a new process; return its JSON result or its failure."""
    command = [sys.executable, str(_FOLDER / script), *arguments]
    environment = {"TF_CPP_MIN_LOG_LEVEL": "2", **os.environ}
    set_gpu_memory_share(environment)
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return {"status": "time limit", "reason": f"--case_seconds={seconds}"}
    if done.returncode == 0:
        result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return result
    said = [line for line in done.stderr.splitlines() if line.strip()] or ["nothing"]
    return {"status": "failed", "reason": f"exit code {done.returncode}: {said[-1][:300]}"}


def rows_of_cases(args: argparse.Namespace, overrides: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Run the cases and yield their rows. Skip larger row counts after a case that failed."""
    sizes = [f"--steps={args.steps}", f"--groups={args.groups}"]
    if args.target is not None:
        sizes.append(f"--target={args.target}")
    for choice in itertools.product(args.models, args.dtypes, args.backends, args.remat):
        for rows in args.rows:
            case = dataclasses.asdict(Case(*choice, rows, args.devices, args.packed))
            arguments = ["--case", json.dumps(case), *sizes, *overrides]
            row = {"case": case, **run("accelerator_case.py", arguments, seconds=args.case_seconds)}
            yield row
            if row["status"] not in ("measured", "compiled"):
                break


def line_of(row: dict[str, Any]) -> str:
    """Return a line of the table."""
    case, asked = row["case"], row["case"]["backend"]
    taken = row.get("attention", asked).split(" ")[0]
    attention = asked if asked in (taken, "") else f"{asked}: {taken}"
    start = (
        f"{case['model']:<6}{case['dtype']:<13}{attention:<15}{case['remat']:<15}{case['rows']:>5}"
    )
    if row["status"] == "compiled":
        return start + _compiled_numbers(row)
    if row["status"] == "measured":
        return start + _measured_numbers(row)
    if row["status"] == "does not fit":
        needed, usable = (row[name] / _GIGA for name in ("predicted_bytes", "usable_bytes"))
        return f"{start}  does not fit: {needed:.1f} GB of {usable:.1f}"
    return f"{start}  {row['status']}: {row.get('reason', '')}"


def _compiled_numbers(row: dict[str, Any]) -> str:
    least = "" if row["least_ms"] is None else f"{row['least_ms']:.2f}"
    copied = f"{row['copied_bytes'] / _GIGA:.2f} of {row['accessed_bytes'] / _GIGA:.1f}"
    return (
        f"{row['predicted_bytes'] / _GIGA:>9.2f}{row['state_bytes'] / _GIGA:>10.2f}"
        f"{row['temporary_bytes'] / _GIGA:>14.2f}{copied:>15}{_products_text(row):>16}{least:>10}"
        f"{row['compile_seconds']:>12.1f}"
    )


def _products_text(row: dict[str, Any]) -> str:
    """Return the count of 8-bit products in the compiled program, such as `18 of 21`."""
    return f"{row['products']['8-bit']} of {row['products']['all']}"


def _measured_numbers(row: dict[str, Any]) -> str:
    ms = row["ms"]
    quartiles = f"{ms['quartile_1']:.2f} to {ms['quartile_3']:.2f}"
    mfu = "" if row["mfu"] is None else f"{100 * row['mfu']:.1f} %"
    peak = "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / _GIGA:.2f}"
    return (
        f"{ms['median']:>8.2f}{quartiles:>17}{row['tokens_per_second_per_device']:>10,.0f}"
        f"{row['tflops_per_second_per_device']:>9.1f}{mfu:>8}{peak:>9}"
        f"{row['predicted_bytes'] / _GIGA:>11.2f}{_products_text(row):>16}{row['first_loss']:>8.3f}"
    )


def check_devices(result: dict[str, Any], args: argparse.Namespace) -> str | None:
    """Return why these devices cannot be used, or None if they can."""
    if "devices" not in result:
        return str(result["reason"])
    here = len(result["devices"])
    if here == 0:
        return "JAX found no GPU or TPU. Use --compile_only to compile for another machine."
    if here < args.devices:
        return f"--devices={args.devices}: expected at most {here}, the number of devices found"
    return None


def main() -> int:
    """Run all cases and return the exit code."""
    args, overrides = parse_arguments()
    target = [] if args.target is None else [f"--target={args.target}"]
    asked = [*target, f"--devices={args.devices}"]
    result = run("accelerator_environment.py", asked, seconds=args.case_seconds)
    if (obstacle := check_devices(result, args)) is not None:
        print(f"accelerators.py: {obstacle}", file=sys.stderr)
        return 2
    for name, value in result.items():
        print(f"{name}: {value}")
    if not result["has_cudnn"] and "TPU" not in result["devices"][0]:
        print("note: cuDNN is not installed; its cases are not supported")
    columns = _MEASURED_COLUMNS if args.target is None else _COMPILED_COLUMNS
    print(_CASE_COLUMNS + columns, flush=True)
    with args.json.open("a") if args.json else contextlib.nullcontext() as file:
        for row in itertools.chain([result], rows_of_cases(args, overrides)):
            if row is not result:
                print(line_of(row), flush=True)
            if file is not None:
                print(json.dumps(row), file=file, flush=True)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)  # what is done has been printed
