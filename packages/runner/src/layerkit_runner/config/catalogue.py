"""The catalogue of a package's experiments, and the text of `--list`.

`--list` and `--exp` read `catalogue.json` beside the package's `__init__.py`, since importing
experiments takes seconds. `python -m layerkit_runner.tools.catalogue PACKAGE` writes it.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from layerkit_runner.errors import UsageError
from layerkit_runner.files.text import aligned, cut

if TYPE_CHECKING:
    from layerkit_runner.config.registry import ExperimentEntry

FILE_NAME = "catalogue.json"

_HEADINGS = ("NAME", "WEIGHTS", "MESH", "DATA", "SUMMARY")


@dataclasses.dataclass(frozen=True)
class CatalogueLine:
    """Facts about an experiment that are available without building it; None if unknown."""

    num_params: int | None
    mesh: str | None
    data: str | None
    summary: str = ""
    tags: tuple[str, ...] = ()


def read_catalogue(folder: str | os.PathLike[str]) -> dict[str, CatalogueLine] | None:
    """Return the catalogue in a package's folder, by names; None if there is no file."""
    path = os.path.join(folder, FILE_NAME)
    if not os.path.isfile(path):
        return None
    with open(path, "rb") as file:
        content = file.read()
    try:
        rows = json.loads(content)
        return {name: CatalogueLine(**{**r, "tags": tuple(r["tags"])}) for name, r in rows.items()}
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise UsageError(f"not a catalogue of experiments: {error!r}", owner=path) from None


def catalogue_file_text(lines: Mapping[str, CatalogueLine]) -> str:
    """Return the content of the file, one experiment per line."""
    rows = [
        f"  {json.dumps(name)}: {json.dumps(dataclasses.asdict(line), ensure_ascii=False)}"
        for name, line in sorted(lines.items())
    ]
    return "{\n" + ",\n".join(rows) + "\n}\n"


def catalogue_text(entries: Sequence[ExperimentEntry], *, width: int | None = None) -> str:
    """Return the text that `--list` prints: a line for each experiment.

    Lines are cut at the width of a terminal; None gives whole lines without headings.
    """
    columns = zip(_HEADINGS, zip(*map(_row, entries), strict=True), strict=True)
    # Empty columns are left out.
    shown = [
        column if width is None else (head, *column) for head, column in columns if any(column)
    ]
    lines = aligned(list(zip(*shown, strict=True)))
    return "\n".join(line if width is None else cut(line, width) for line in lines)


def catalogue_json(entries: Sequence[ExperimentEntry]) -> list[dict[str, Any]]:
    """Return the objects that `--list --json` prints; unknown values are None."""
    return [
        {"name": entry.name, "class": entry.dotted, **dataclasses.asdict(entry.line)}
        for entry in entries
    ]


def _row(entry: ExperimentEntry) -> tuple[str, str, str, str, str]:
    line = entry.line
    unknown = "" if line.mesh is None else "—"
    count = unknown if line.num_params is None else short_count(line.num_params)
    return entry.name, count, line.mesh or "", line.data or "", line.summary


def short_count(count: int) -> str:
    """Return a number of weights in its usual form: `126M`, `5.24B`, `998K`.

    >>> [short_count(n) for n in (959_872, 125_439_744, 5_242_880_000, 175_181_291_520)]
    ['960K', '125M', '5.24B', '175B']
    """
    for size, letter in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= 0.9995 * size:
            value = count / size
            digits = 0 if value >= 99.95 else 1 if value >= 9.995 else 2
            return f"{value:.{digits}f}{letter}"
    return str(count)
