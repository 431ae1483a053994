"""Renew the parts of the documentation that are made from the code.

- docs/pictures/architecture.svg: the folders of the packages and the imports between them;
- the table of commands in CONTRIBUTING.md, from the docstrings of noxfile.py;
- the order of the runner's folders in docs/life_of_an_experiment.md, from pyproject.toml;
- the table of planned models in docs/results.md, from the figures in docs/results/plans.json;
- the families of Hugging Face in docs/hugging_face.md and README.md, from the first lines of the
  families' files (`MODELS (SOURCE): WHAT.`) and the errors that `nox -s parity` measured.

    python scripts/renew_docs.py
    python scripts/renew_docs.py --check     # write nothing; fail if a part is not current
"""

from __future__ import annotations

import argparse
import json
import re
import runpy
import sys
import textwrap
import tomllib
from pathlib import Path

from measure_house import PACKAGES, ROOT, Rooms, measure_rooms

from layerkit.interop.hugging_face import families
from layerkit.interop.hugging_face.family import Family

PICTURE = ROOT / "docs/pictures/architecture.svg"
CONTRIBUTING, README = ROOT / "CONTRIBUTING.md", ROOT / "README.md"
LIFE, CONTRACTS = ROOT / "docs/life_of_an_experiment.md", ROOT / "pyproject.toml"
HUGGING_FACE, RESULTS = ROOT / "docs/hugging_face.md", ROOT / "docs/results.md"
# Figures of `--mode=plan`, with their dates.
PLANS = ROOT / "docs/results/plans.json"
# Largest error of the logits that `nox -s parity` measured, by `model_type`.
ERRORS = ROOT / "packages/layerkit/tests/interop/hugging_face/parity.json"
SUMMARY = re.compile(r"(?P<models>[^(:]+?)( \([^:]+\))?: (?P<what>.+)\.")
BEGIN = "<!-- made by scripts/renew_docs.py from {} -->\n"
END = "<!-- end -->"

# Sizes in pixels.
BOX, HEIGHT, GAP = 82, 26, 8
ROW, FLOOR = HEIGHT + 8, 30  # a row of boxes; the space between two floors
COLUMN, TOP, MARGIN = 3 * BOX + 2 * GAP + 40, 64, 16
# Packages from the left: each imports those to its right.
COLUMNS = ("experiments", "runner", "inputs", "layerkit")


def draw_architecture() -> str:
    """Return an SVG with a column for each package, whose imports point down."""
    columns = [_place_rooms(measure_rooms(PACKAGES[folder])) for folder in COLUMNS]
    height = TOP + max(y for boxes, _ in columns for _, y in boxes.values()) + HEIGHT + 2 * MARGIN
    width = len(COLUMNS) * COLUMN + MARGIN
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="system-ui, sans-serif" font-size="11" text-anchor="middle">',
        "<title>Packages, their folders, and the imports between folders</title>",
        '<marker id="head" viewBox="0 0 6 6" refX="6" refY="3" markerWidth="6" markerHeight="6" '
        'orient="auto"><path d="M0 0 6 3 0 6z" fill="#7a8794"/></marker>',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
    ]
    for index, (folder, (boxes, arrows)) in enumerate(zip(COLUMNS, columns, strict=True)):
        left = index * COLUMN + MARGIN
        middle = left + (COLUMN - MARGIN) / 2
        lines += [
            f'<rect x="{left}" y="{MARGIN}" width="{COLUMN - MARGIN}" height="{height - 32}" '
            'rx="8" fill="#f4f6f8"/>',
            f'<text x="{middle}" y="{MARGIN + 26}" font-size="15" '
            f'font-weight="bold">{folder}</text>',
        ]
        if index:
            y = MARGIN + 22
            lines.append(_line(f"M{left - MARGIN - 40} {y}H{left + 40}"))
        for source, target in arrows:
            x1, y1 = boxes[source]
            x2, y2 = boxes[target]
            start = f"M{left + x1 + BOX / 2} {TOP + y1 + HEIGHT}"
            bend = f"C{left + x1 + BOX / 2} {TOP + y1 + HEIGHT + 20}"
            end = f"{left + x2 + BOX / 2} {TOP + y2 - 20} {left + x2 + BOX / 2} {TOP + y2}"
            lines.append(_line(f"{start}{bend} {end}"))
        for room, (x, y) in boxes.items():
            lines += [
                f'<rect x="{left + x}" y="{TOP + y}" width="{BOX}" height="{HEIGHT}" rx="4" '
                'fill="#fff" stroke="#31557f"/>',
                f'<text x="{left + x + BOX / 2}" y="{TOP + y + 17}">{room}</text>',
            ]
    return "\n".join([*lines, "</svg>\n"])


def _line(path: str) -> str:
    return f'<path d="{path}" fill="none" stroke="#7a8794" marker-end="url(#head)"/>'


Boxes = dict[str, tuple[int, int]]


def _place_rooms(rooms: Rooms) -> tuple[Boxes, list[tuple[str, str]]]:
    """Return the corner of the box of each room, and the arrows that no longer path implies."""
    floors = rooms.floors()
    boxes: Boxes = {}
    y = 0
    for floor in sorted(set(floors.values()), reverse=True):
        names = [name for name in rooms.names if floors[name] == floor]
        for start in range(0, len(names), 3):
            row = names[start : start + 3]
            left = 12 + (3 - len(row)) * (BOX + GAP) // 2
            for index, name in enumerate(row):
                boxes[name] = (left + index * (BOX + GAP), y)
            y += ROW
        y += FLOOR
    return boxes, _reduce({(a, b) for a, b in rooms.arrows if floors[a] > floors[b]})


def _reduce(arrows: set[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the transitive reduction of arrows without circles."""

    def reaches(source: str, target: str) -> bool:
        below = {b for a, b in arrows if a == source}
        return target in below or any(reaches(room, target) for room in below)

    return [
        (a, b)
        for a, b in sorted(arrows)
        if not any(reaches(other, b) for x, other in arrows if x == a and other != b)
    ]


def write_commands() -> str:
    """Return CONTRIBUTING.md with a table of the commands of start.py."""
    commands = runpy.run_path(str(ROOT / "start.py"))["commands"]()
    rows = [
        f"| `start.py {name}` | `{session}` | {text} |"
        for name, (session, text) in commands.items()
    ]
    table = "\n".join(["| command | nox session | action |", "|---|---|---|", *rows, ""])
    return _replace(CONTRIBUTING, "the docstrings of noxfile.py", "\n" + table)


def write_order() -> str:
    """Return docs/life_of_an_experiment.md with the folders of the runner, the importing first."""
    contracts = tomllib.loads(CONTRACTS.read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = [c["layers"] for c in contracts if c.get("containers") == ["layerkit_runner"]]
    text = " → ".join(f"`{layer}`" for layer in layers)
    return _replace(LIFE, "the import contracts", f"\n{textwrap.fill(text, 118)}\n")


def write_plans() -> str:
    """Return docs/results.md with a row for each stored plan, and its GPU hours for 1B tokens.

    Rates that others measured follow in a table of their own.
    """
    rows = [
        "| plan | weights | peak | tokens/s | MFU | GPU hours, 1B tokens |",
        "|---|---|---|---|---|---|",
    ]
    published = [
        "| plan | peak | tokens/s of a chip, bounds | published | of the bound |",
        "|---|---|---|---|---|",
    ]
    for plan in json.loads(PLANS.read_text()):
        flags = f" `{plan['flags']}`" if plan["flags"] else ""
        name = f"`{plan['experiment']}`{flags} `--target={plan['target']}`, {plan['mesh']}"
        speeds = sorted(plan["tokens_per_sec"])
        bound = "" if plan["limited_by"] == "compute" else f", by the {plan['limited_by']}"
        if other := plan.get("published"):
            rate, (low, high) = other["rate"], (x / other["chips"] for x in speeds)
            source = f"{rate:,.0f} ([{other['by']}]({other['source']}))"
            cells = (f"{low:,.0f} to {high:,.0f}{bound}", source, f"{100 * rate / high:.0f} %")
            peak = f"{plan['peak_gb']:g} GB"
            published.append(f"| {' | '.join((name, peak, *cells))} |")
            continue
        hours = [1e9 / speed / 3600 * plan["num_devices"] for speed in reversed(speeds)]
        mfu = sorted(plan["mfu_percent"])
        cells = (
            name,
            f"{plan['num_params'] / 1e9:.3g}B",
            f"{plan['peak_gb']:g} GB",
            f"{speeds[0]:,} to {speeds[1]:,}",
            f"{mfu[0]} to {mfu[1]} %{bound}",
            " to ".join(f"{x:,.0f}" if x >= 100 else f"{x:.3g}" for x in hours),
        )
        rows.append(f"| {' | '.join(cells)} |")
    title = (
        "Rates that others published for such a step, beside the bounds of ours, in which products "
    )
    title += "in float8 take half of the time of those in bfloat16:"
    return _replace(
        RESULTS,
        "docs/results/plans.json",
        "\n" + "\n".join([*rows, "", title, "", *published, ""]),
    )


def _replace(path: Path, source: str, part: str) -> str:
    """Return the text of a page in which the part made from `source` is another."""
    begin = BEGIN.format(source)
    before, has_begin, rest = path.read_text().partition(begin)
    _, has_end, after = rest.partition(END)
    if not (has_begin and has_end):
        sys.exit(f"{path}: expected the lines {begin!r} and {END!r}.")
    return before + begin + part + END + after


Models = tuple[str, str, list[Family]]


def list_families() -> list[Models]:
    """Return (models, what they are, families) of each file, in the order of export."""
    modules = [sys.modules[f"{families.__name__}.{name}"] for name in families.MODULES]
    # A module also has the families that it changes, which come from earlier modules.
    module_of = {id(x): module for module in reversed(modules) for x in vars(module).values()}
    models: dict[str, Models] = {}
    for family in families.FAMILIES:
        name = module_of[id(family)].__name__
        first = (module_of[id(family)].__doc__ or "").partition("\n")[0]
        summary = SUMMARY.fullmatch(first)
        if summary is None:
            sys.exit(f"{name}: {first!r}: expected `MODELS (SOURCE): WHAT.` in the first line.")
        models.setdefault(name, (summary["models"], summary["what"], []))[2].append(family)
    return list(models.values())


def write_table(models: list[Models]) -> str:
    """Return docs/hugging_face.md with the table of families and of measured errors."""
    errors: dict[str, float] = json.loads(ERRORS.read_text())
    rows = ["| `model_type` | models | architecture | error | test |", "|---|---|---|---|---|"]
    for names, what, members in models:
        types = ", ".join(f"`{family.model_type}`" for family in members)
        measured = [errors[family.model_type] for family in members if family.model_type in errors]
        error = f"{max(measured):.1e}" if measured else "—"
        classes = [re.sub(r"(For\w+|LMHeadModel)$", "", x.architecture) for x in members]
        stems = list(dict.fromkeys(classes))
        words = f'"{" or ".join(stems)}"' if len(stems) > 1 else stems[0]
        rows.append(f"| {types} | {names} | {what} | {error} | `-k {words}` |")
    return _replace(HUGGING_FACE, "the families", "\n" + "\n".join([*rows, ""]))


def write_features(models: list[Models]) -> str:
    """Return README.md with the list of models that are imported and exported."""
    names = [names for names, _, _ in models]
    text = f"- **Hugging Face**: import and export {', '.join(names[:-1])}, and {names[-1]}; "
    text += "the round trip is exact to the bit ([hugging_face](docs/hugging_face.md))."
    lines = textwrap.wrap(text, 104, subsequent_indent="  ", break_long_words=False)
    return _replace(README, "the families", "\n".join(lines))


def main() -> int:
    """Write the parts, or return 1 if `--check` is given and one is not current."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if a part is not current")
    check = parser.parse_args().check
    sys.setrecursionlimit(10_000)
    models = list_families()
    parts: dict[Path, str] = {PICTURE: draw_architecture(), CONTRIBUTING: write_commands()}
    parts |= {HUGGING_FACE: write_table(models), README: write_features(models)}
    parts |= {LIFE: write_order(), RESULTS: write_plans()}
    stale = [path for path, text in parts.items() if not path.exists() or path.read_text() != text]
    for path in stale:
        print(f"{path.relative_to(ROOT)} is not current. Run `python scripts/renew_docs.py`.")
        if not check:
            path.write_text(parts[path])
    return bool(check and stale)


if __name__ == "__main__":
    sys.exit(main())
