"""Write experiment classes of Pax as experiments of this project.

    python -m layerkit_runner.tools.translate pax FILE.py… [--class=NAME…]

Pax need not be installed, and no code of the files is run. Later files take precedence. Values that
are not translated are listed on standard error and in comments of the class, which is then abstract
and does not run. Skipped classes are listed as well, and so are constants that no class of Pax
reads, which are left out.

Exit codes: 0 if everything is translated, 1 if something is not, 2 if the command line is wrong.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from layerkit.errors import UserError
from layerkit_runner.config.help import read_command
from layerkit_runner.errors import UsageError
from layerkit_runner.files.bounded_documents import DocumentError, read_text
from layerkit_runner.run_options import Flag
from layerkit_runner.tools.translate.pax_classes import translate_pax
from layerkit_runner.tools.translate.tables import module_text, read_tables

# The flags of the framework.
_FLAGS = {
    "pax": (
        Flag(
            "class",
            str,
            "class to write; repeatable; by default the registered classes, or those that no other"
            " inherits",
            "NAME",
            repeats=True,
        ),
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the words of a command line, None for those of this process; return the exit code."""
    words = sys.argv[1:] if arguments is None else arguments
    try:
        command = read_command(words, _FLAGS, kind="framework", page=__doc__ or "")
        if command is None:
            return 0
        _, values, files = command
        if not files:
            raise UsageError(field="files", value=files, expected="one or more")
        names, texts = values["class"], {file: _read(file) for file in files}
        translations, others = translate_pax(texts, read_tables(), names)
    except (UserError, OSError) as error:
        print(f"translate: {error}", file=sys.stderr)
        return UsageError.exit_code
    print(module_text(translations), end="")
    notes = []
    for made in translations:
        notes += [f"{made.name}: not translated: {leftover}" for leftover in made.leftovers]
        notes += [f"{made.name}: left out: {constant}" for constant in made.unread]
        notes += [f"{made.name} is abstract until these are resolved"] * bool(made.leftovers)
    if others and names is None:
        notes.append(f"skipped: {', '.join(others)}; --class=NAME writes one")
    for note in notes:
        print(f"translate: {note}", file=sys.stderr)
    return 1 if any(made.leftovers for made in translations) else 0


def _read(file: str) -> str:
    try:
        return read_text(Path(file))
    except DocumentError as error:
        raise UsageError(str(error), owner=file) from error


if __name__ == "__main__":
    sys.exit(main())
