"""Trains what docs/convergence.md shows: three runs, each beside what its loss is to be judged by.

    python scripts/convergence data pile c4 lambada --folder=runs/convergence

- `data`: made-up passages (`passages`) as TFDS folders of C4, The Pile and LAMBADA, and a
  SentencePiece vocabulary of them.
- `pile`: `lm.pile.Pile126M`, narrower, on the bytes of Python's own sources; and the same run once
  more, killed half way and resumed.
- `c4`: `lm.c4.C4Spmd1BAdam4Replicas`, narrower, on the passages, through SeqIO.
- `lambada`: `lm.pile.Pile126M`, narrower, on the passages, and beside it `lm.pile.Lambada126M`,
  which asks each of its checkpoints for last words.

Every command is printed before it runs, and what is done already is not done again. A record of
each run goes to docs/convergence/NAME.json, is drawn to NAME.png beside it (`pictures`) and written
into the page (`page`); `draw` does only this, from the records. Words such as `--fdl.MAX_STEPS=20`
change a field of every run.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import levels
import page
import pictures
from fields import RUNS
from runner import Runner
from runs import JOBS, SUBJECTS, sizes

PAGE = Path(__file__).resolve().parents[2] / "docs" / "convergence.md"


def record(subject: str, runner: Runner, *, docs: Path) -> Path:
    """Trains a subject, and writes its record to `docs`."""
    found = {
        "experiment": RUNS[subject][0],
        **SUBJECTS[subject](runner),
        **sizes(runner.folder / JOBS[subject]),
        "commands": runner.commands,
        **circumstances(),
    }
    path = docs / f"{subject}.json"
    path.write_text(as_text(found))
    return path


def circumstances() -> dict[str, Any]:
    """When, where and with what."""
    names = ("jax", "jaxlib", "flax", "optax", "numpy")
    return {
        "date": datetime.date.today().isoformat(),
        "machine": f"{len(os.sched_getaffinity(0))} core(s), {_processor()}",
        "versions": {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in names},
        },
    }


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def as_text(found: Mapping[str, Any]) -> str:
    """JSON with a line for each entry, so that a change of a figure is seen in review."""
    entries = (f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in found.items())
    return "{\n" + ",\n".join(entries) + "\n}\n"


def main() -> None:
    """Does what the words of the command say."""
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n\n")[0], epilog="--fdl.NAME=VALUE: a field of every run"
    )
    parser.add_argument("subjects", nargs="+", choices=["data", *SUBJECTS, "draw"])
    parser.add_argument("--folder", type=Path, default=Path("runs/convergence"), help="of the runs")
    parser.add_argument("--page", type=Path, default=PAGE, help="beside the folder of its records")
    parser.add_argument(
        "--passages", type=int, default=levels.NUM_PASSAGES["train"], help="to train on"
    )
    args, words = parser.parse_known_args()
    overrides = {}
    for word in words:
        name, equals, value = word.removeprefix("--fdl.").partition("=")
        if not (word.startswith("--fdl.") and equals):
            parser.error(f"unknown word {word!r}")
        overrides[name] = value
    docs = args.page.with_suffix("")
    docs.mkdir(parents=True, exist_ok=True)
    for subject in dict.fromkeys(args.subjects):
        if subject == "data":
            if not (args.folder / "data").exists():
                levels.write_data(args.folder / "data", num_train=args.passages)
        elif subject != "draw":
            print(f"\n{record(subject, Runner(args.folder, overrides), docs=docs)}")
    for path in sorted(docs.glob("*.json")):
        pictures.draw(path)
    args.page.write_text(page.with_records(args.page.read_text(), docs))


if __name__ == "__main__":
    main()
