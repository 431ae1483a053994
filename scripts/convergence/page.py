"""Write the generated parts of docs/convergence.md: pictures, figures and commands.

A part is between `<!-- NAME -->` and `<!-- end of NAME -->`. The text around it is hand-written.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

WIDTH = 110


def with_records(page: str, folder: Path) -> str:
    """Return the page with the parts of all records in `folder` replaced."""
    for path in sorted(folder.glob("*.json")):
        name = path.stem
        part = (
            f"<!-- {name} -->\n{section(name, json.loads(path.read_text()))}<!-- end of {name} -->"
        )
        pattern = re.compile(f"<!-- {name} -->\n.*<!-- end of {name} -->", re.DOTALL)
        page = pattern.sub(lambda _, part=part: part, page)
    return page


def section(name: str, record: Mapping[str, Any]) -> str:
    """Return the part of a run in Markdown."""
    folder = "after_pretraining" if "stages" in record else "convergence"
    blocks = [
        f"![Loss over steps]({folder}/{name}.png)",
        *([table(answers(record))] if "stages" in record else [table(losses(record))]),
        *([table(last_words(record))] if "guesses" in record else []),
        *([resumed(record["resumed"])] if "resumed" in record else []),
        *([resumed_stages(record)] if "stages" in record else []),
        "```sh\n" + "\n".join(map(folded, record["commands"])) + "\n```",
        circumstances(record),
    ]
    return "\n\n".join(blocks) + "\n"


def losses(record: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """Yield the held-out loss of the model and its levels; byte losses are in bits."""
    of_bytes = record["unit"] == "nats per byte"
    step, loss = record["all_heldout"] if "all_heldout" in record else record["heldout"][-1]
    result = {f"the model, {record['num_params']:,} weights, step {step}": loss, **record["levels"]}
    yield f"held-out text, {'bits per byte' if of_bytes else record['unit']}", ""
    for what, nats in sorted(result.items(), key=lambda item: -item[1]):
        yield what, f"{nats / math.log(2) if of_bytes else nats:.3f}"


def last_words(record: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """Yield the last-word accuracy of the model and of guesses."""
    (first, untrained), *_, (last, trained) = record["last_word_accuracy"]
    yield "last-word accuracy", ""
    yield f"the model, step {first}", f"{untrained:.1%}"
    for what, share in record["guesses"].items():
        yield f"guess: {what}", f"{share:.1%}"
    yield f"the model, step {last}", f"{trained:.1%}"
    step, accuracy = record["eval_once"]
    yield f"the model by `--mode=eval_once`, step {step}", f"{accuracy:.1%}"


def answers(record: Mapping[str, Any]) -> Iterable[tuple[str, ...]]:
    """Yield the shares of right and of courteous answers at the start and the end of stages."""
    stages, num_params = record["stages"], record["num_params"]
    rows = {
        f"pre-trained, {num_params:,} weights": stages["chat"]["answers"][0],
        "tuned on conversations": stages["chat"]["answers"][-1],
        "tuned on preferences": stages["dpo"]["answers"][-1],
        f"distilled, {record['num_params_of_student']:,} weights": stages["distilled"]["answers"][
            -1
        ],
    }
    yield "answers to held-out questions", "right", "courteous"
    for what, (_, right, courteous) in rows.items():
        yield what, f"{right:.1%}", f"{courteous:.1%}"


def resumed_stages(record: Mapping[str, Any]) -> str:
    """Return the comparison of each killed and resumed stage with the uninterrupted one."""
    rows = [("job", "killed after step", "resumed from step", "largest difference of a loss")]
    for job, stage in record["stages"].items():
        result = stage["resumed"]
        values = (result["killed_after"], result["from_step"], f"{result['largest_difference']:g}")
        rows.append((job, *map(str, values)))
    return table(rows)


def resumed(result: Mapping[str, Any]) -> str:
    """Return the comparison of the killed and resumed run with the uninterrupted one."""
    return (
        f"Killed after step {result['killed_after']}, resumed from step {result['from_step']}. The"
        f" largest difference between the training losses of this run and the uninterrupted run is"
        f" {result['largest_difference']:g}."
    )


def table(rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; the first row is the header."""
    head, *body = ("| " + " | ".join(row) + " |" for row in rows)
    return "\n".join([head.replace("|  |", "| |"), "|---" * (head.count("|") - 1) + "|", *body])


def folded(command: str) -> str:
    """Return a command, wrapped to lines of at most WIDTH characters."""
    lines = [""]
    for word in command.split(" "):
        if len(lines[-1]) + len(word) + 3 > WIDTH and lines[-1]:
            lines[-1] += " \\"
            lines.append("   ")
        lines[-1] += f" {word}" if lines[-1] else word
    return "\n".join(lines)


def circumstances(record: Mapping[str, Any]) -> str:
    """Return the line with the date, the training size, the machine and the versions."""
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    tokens = f"{record['tokens']:,} {record['unit'].rpartition(' ')[2]}s trained on"
    return f"{record['date']}; {tokens}; {record['machine']}; {versions}."
