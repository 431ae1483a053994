"""Write a configuration of MaxText or Pax as an experiment of this project.

    python -m layerkit_runner.tools.translate maxtext FILE.yml… [KEY=VALUE…]     a class
    python -m layerkit_runner.tools.translate pax FILE.py… [--class=NAME…]       classes

Neither MaxText nor Pax needs to be installed, and no code of the files is run. Later files and
words take precedence. Values that are not translated are listed on standard error and in comments
of the class, which is then abstract and does not run. Skipped classes of Pax are listed as well.

Exit codes: 0 if everything is translated, 1 if something is not, 2 if the command line is wrong.
"""

from __future__ import annotations

import argparse
import keyword
import sys
from collections.abc import Sequence
from pathlib import Path

from layerkit.errors import UserError
from layerkit_runner.errors import UsageError
from layerkit_runner.files.bounded_documents import DocumentError, read_text
from layerkit_runner.tools.translate.maxtext import read_values, translate_maxtext
from layerkit_runner.tools.translate.pax import translate_pax
from layerkit_runner.tools.translate.tables import Translation, module_text, read_tables


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the words of a command line, None for those of this process; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="translate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    frameworks = parser.add_subparsers(dest="framework", required=True, metavar="FRAMEWORK")
    maxtext = frameworks.add_parser("maxtext", help="YAML files and KEY=VALUE", allow_abbrev=False)
    maxtext.add_argument("words", nargs="+", metavar="FILE.yml or KEY=VALUE")
    text = "MaxText's base.yml, for keys that the others omit"
    maxtext.add_argument("--defaults", metavar="FILE.yml", help=text)
    maxtext.add_argument("--name", default="FromMaxText", help="name of the class", metavar="NAME")
    pax = frameworks.add_parser("pax", help="Python files of experiments", allow_abbrev=False)
    pax.add_argument("files", nargs="+", metavar="FILE.py")
    text = "repeatable; by default the registered classes, or those that no other inherits"
    pax.add_argument("--class", dest="classes", action="append", metavar="NAME", help=text)
    options = parser.parse_args(arguments)
    try:
        return _maxtext(options) if options.framework == "maxtext" else _pax(options)
    except (UserError, OSError) as error:
        print(f"translate: {error}", file=sys.stderr)
        return UsageError.exit_code


def _maxtext(options: argparse.Namespace) -> int:
    if not options.name.isidentifier() or keyword.iskeyword(options.name):
        raise UsageError(field="--name", value=options.name, expected="the name of a class")
    files = [word for word in options.words if "=" not in word]
    values = read_values(_texts(files), [word for word in options.words if "=" in word])
    defaults = [] if options.defaults is None else [options.defaults]
    translation = translate_maxtext(
        values, read_tables(), name=options.name, defaults=read_values(_texts(defaults), [])
    )
    return _print_classes([translation], "MaxText")


def _pax(options: argparse.Namespace) -> int:
    translations, others = translate_pax(_texts(options.files), read_tables(), options.classes)
    code = _print_classes(translations, "Pax")
    if others and options.classes is None:
        print(f"translate: skipped: {', '.join(others)}; --class=NAME writes one", file=sys.stderr)
    return code


def _texts(files: Sequence[str]) -> dict[str, str]:
    """Return the contents of files by name; a repeated name has its last position."""
    texts: dict[str, str] = {}
    for file in files:
        texts.pop(file, None)
        try:
            texts[file] = read_text(Path(file))
        except DocumentError as error:
            raise UsageError(str(error), owner=file) from error
    return texts


def _print_classes(translations: Sequence[Translation], source: str) -> int:
    print(module_text(translations, f"Translated from {source}."), end="")
    for each in translations:
        for leftover in each.leftovers:
            print(f"translate: {each.name}: not translated: {leftover}", file=sys.stderr)
        if each.leftovers:
            print(f"translate: {each.name} is abstract until these are resolved", file=sys.stderr)
    return 1 if any(each.leftovers for each in translations) else 0


if __name__ == "__main__":
    sys.exit(main())
