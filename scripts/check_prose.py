"""Fail if docstrings open with sentence fragments, or if the docs use words that are banned.

Run by the `lint` session:

    python3 scripts/check_prose.py

Functions are expected to open with an imperative verb and classes with a noun phrase. Ruff checks
the mood of public functions (D401); this script counts openers such as "Whose" and "Under which" in
all docstrings and in all entries of their sections, and reports them per package.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAX_FRAGMENTS = 0.02
# First words of a sentence fragment, in lower case.
OPENERS = frozenset(
    re.findall(
        r"\w+",
        """
        about after and as at because before besides between but by either from has hers his holds
        how if in is its like neither not nor of on only or since so such than that theirs then
        these they this those to told under unless until was what whatever when where which
        who whoever whom whose why with within without
        """,
    )
)
ENTRY = re.compile(r"^\s+\*{0,2}\w+: (.*)", re.MULTILINE)
BANNED = re.compile(
    r"goes on from|is told|tells nothing|that nobody|of one's own|stands in\b|what becomes of"
    # The packages are on no index: docs/install.md installs them from the repository.
    r"|pip install ['\"]?layerkit[-'\"[]",
    re.IGNORECASE,
)
DOCUMENTED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def openings(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, first words) of each docstring of a function or class, and of its entries."""
    for node in ast.walk(ast.parse(path.read_text())):
        text = ast.get_docstring(node) if isinstance(node, DOCUMENTED) else None
        if text:
            yield node.lineno, text
            for entry in ENTRY.finditer(text):
                yield node.lineno, entry[1]


def is_fragment(text: str) -> bool:
    """Return whether a text opens with a word that begins no sentence or noun phrase."""
    word = re.match(r"[A-Za-z]+", text)
    return word is not None and word[0].lower() in OPENERS


def main() -> int:
    """Print the figures of each package, with the places if there are too many; return the status.

    `--all` prints every place.
    """
    failed = False
    for package in sorted((ROOT / "packages").iterdir()):
        places, count = [], 0
        for path in sorted((package / "src").rglob("*.py")):
            for line, text in openings(path):
                count += 1
                if is_fragment(text):
                    places.append(f"{path.relative_to(ROOT)}:{line}: {text.splitlines()[0]}")
        share = len(places) / max(count, 1)
        print(f"{package.name}: {len(places)} of {count} docstrings and entries ({share:.1%})")
        if share > MAX_FRAGMENTS or "--all" in sys.argv:
            print("\n".join(places))
        failed |= share > MAX_FRAGMENTS
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("packages/*/*.md")]
    for path in sorted([*pages, *ROOT.glob("packages/*/src/**/*.py")]):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if result := BANNED.search(line):
                place = f"{path.relative_to(ROOT)}:{number}"
                print(f"{place}: {result[0]!r} is banned: {line.strip()}")
                failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
