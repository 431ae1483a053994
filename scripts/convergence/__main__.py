"""Train the runs of docs/convergence.md and docs/after_pretraining.md, and record their figures.

    python scripts/convergence data pile c4 lambada --folder=runs/convergence
    python scripts/convergence facts chain

- `data`: write synthetic passages (`passages`) as TFDS folders of C4, The Pile and LAMBADA, and
  their SentencePiece vocabulary.
- `pile`: train `lm.pile.Pile126M`, narrower, on the bytes of Python's standard library; train it
  again with a kill half way and a resume.
- `c4`: train `lm.c4.C4Spmd1BAdam4Replicas`, narrower, on the passages, through SeqIO.
- `lambada`: train `lm.pile.Pile126M`, narrower, on the passages, and evaluate each of its
  checkpoints on last words with `lm.pile.Lambada126M`.
- `facts`: write stories, conversations and preferences about an invented world (`facts`).
- `chain`: pre-train a model on the stories, tune it on the conversations and the preferences, and
  distill it; do each step again with a kill half way and a resume.
- `draw`: draw the records and write them into the pages.

The script prints each command before it runs and skips completed work. Each run writes a record to
docs/PAGE/NAME.json, a picture to NAME.png (`pictures`) and a section of the page (`page`).
Arguments such as `--fdl.MAX_STEPS=20` override a field of every run.
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

import chain
import levels
import page
import pictures
from fields import RUNS
from runner import Runner
from runs import JOBS, SUBJECTS, sizes

PAGES = {"chain": chain.PAGE}
PAGE = chain.PAGE.with_name("convergence.md")


def record(subject: str, runner: Runner, *, docs: Path) -> Path:
    """Train a subject, write its record to `docs` and return the path."""
    result = {
        "experiment": RUNS[subject][0] if subject in RUNS else "assistant",
        **SUBJECTS[subject](runner),
        **sizes(runner.folder / JOBS[subject]),
        "commands": runner.commands,
        **circumstances(),
    }
    path = docs / f"{subject}.json"
    path.write_text(as_text(result))
    return path


def circumstances() -> dict[str, Any]:
    """Return the date, the machine and the package versions."""
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


def as_text(result: Mapping[str, Any]) -> str:
    """Return JSON with a line for each entry, for readable diffs."""
    entries = (f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in result.items())
    return "{\n" + ",\n".join(entries) + "\n}\n"


def main() -> None:
    """Run the subjects of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n\n")[0], epilog="--fdl.NAME=VALUE: override in every run"
    )
    parser.add_argument("subjects", nargs="+", choices=["data", "facts", *JOBS, "draw"])
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/convergence"), help="folder of the runs"
    )
    parser.add_argument(
        "--page",
        type=Path,
        help="page to update instead of those in docs; its records are in the folder PAGE names",
    )
    parser.add_argument(
        "--passages",
        type=int,
        default=levels.NUM_PASSAGES["train"],
        help="number of training passages",
    )
    args, words = parser.parse_known_args()
    overrides = {}
    for word in words:
        name, equals, value = word.removeprefix("--fdl.").partition("=")
        if not (word.startswith("--fdl.") and equals):
            parser.error(f"unknown argument {word!r}; expected --fdl.NAME=VALUE")
        overrides[name] = value
    for subject in dict.fromkeys(args.subjects):
        if subject == "data":
            if not (args.folder / "data").exists():
                levels.write_data(args.folder / "data", num_train=args.passages)
        elif subject == "facts":
            chain.write_data(args.folder / "facts")
        elif subject != "draw":
            docs = (args.page or PAGES.get(subject, PAGE)).with_suffix("")
            docs.mkdir(parents=True, exist_ok=True)
            print(f"\n{record(subject, Runner(args.folder, overrides), docs=docs)}")
    for path in [args.page] if args.page else [PAGE, *PAGES.values()]:
        for recorded in sorted(path.with_suffix("").glob("*.json")):
            pictures.draw(recorded)
        path.write_text(page.with_records(path.read_text(), path.with_suffix("")))


if __name__ == "__main__":
    main()
