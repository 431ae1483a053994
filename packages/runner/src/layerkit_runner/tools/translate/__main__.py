"""Write a configuration of MaxText or Pax as an experiment of this project.

    python -m layerkit_runner.tools.translate maxtext FILE.yml… [KEY=VALUE…]     a class
    python -m layerkit_runner.tools.translate maxtext FILE.yml… [KEY=VALUE…] --exp=NAME
                                                 the command that runs NAME with these values
    python -m layerkit_runner.tools.translate pax FILE.py… [--class=NAME…]       classes

Neither MaxText nor Pax needs to be installed, and no code of the files is run. Later files and
words take precedence. Values that are not translated are listed on standard error and in comments
of the class, which is then abstract and does not run. Skipped classes of Pax are listed as well.

Exit codes: 0 if everything is translated, 1 if something is not, 2 if the command line is wrong or
the requested command cannot have every value.
"""

from __future__ import annotations

import argparse
import keyword
import sys
from collections.abc import Sequence
from pathlib import Path

from layerkit.errors import UserError
from layerkit_runner.config.registry import find_experiment
from layerkit_runner.errors import UsageError
from layerkit_runner.files.bounded_documents import DocumentError, read_text
from layerkit_runner.tools.translate.maxtext import read_values, translate_maxtext
from layerkit_runner.tools.translate.pax import translate_pax
from layerkit_runner.tools.translate.tables import (
    Translation,
    command_text,
    module_text,
    read_tables,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code.

    Args:
      arguments: Words after the program's name; None for those of this process.
    """
    options = _parser().parse_args(arguments)
    try:
        return _maxtext(options) if options.framework == "maxtext" else _pax(options)
    except (UserError, OSError) as error:
        print(f"translate: {error}", file=sys.stderr)
        return UsageError.exit_code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="translate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    frameworks = parser.add_subparsers(dest="framework", required=True, metavar="FRAMEWORK")
    maxtext = frameworks.add_parser("maxtext", help="YAML files and KEY=VALUE", allow_abbrev=False)
    add = maxtext.add_argument
    add("words", nargs="+", metavar="FILE.yml or KEY=VALUE")
    add("--defaults", metavar="FILE.yml", help="MaxText's base.yml, for keys that the others omit")
    add("--name", default="FromMaxText", help="name of the class", metavar="NAME")
    add("--exp", metavar="NAME", help="print the command that runs this experiment with the values")
    add("--devices_per_slice", type=int, metavar="N", help="number that -1 fills up to")
    add("--ignore", default="", metavar="KEYS", help="keys to leave out, separated by commas")
    pax = frameworks.add_parser("pax", help="Python files of experiments", allow_abbrev=False)
    pax.add_argument("files", nargs="+", metavar="FILE.py")
    text = "repeatable; by default the registered classes, or those that no other inherits"
    pax.add_argument("--class", dest="classes", action="append", metavar="NAME", help=text)
    return parser


def _maxtext(options: argparse.Namespace) -> int:
    if not options.name.isidentifier() or keyword.iskeyword(options.name):
        raise UsageError(field="--name", value=options.name, expected="the name of a class")
    files = [word for word in options.words if "=" not in word]
    values = read_values(_texts(files), [word for word in options.words if "=" in word])
    for key in options.ignore.split(",") if options.ignore else ():
        if key not in values:
            raise UsageError("unknown key", field="--ignore", value=key, choices=values)
        del values[key]
    translation = translate_maxtext(
        values,
        read_tables(),
        name=options.name,
        defaults=None if options.defaults is None else read_values(_texts([options.defaults]), []),
        devices_per_slice=options.devices_per_slice,
    )
    if options.exp is None:
        return _print_classes([translation], "MaxText")
    if translation.leftovers:
        lines = "".join(f"\n  {leftover}" for leftover in translation.leftovers)
        hint = f"Leave them out by --ignore, or omit --exp to write a class:{lines}"
        raise UsageError("some values have no flag", hint=hint)
    print(command_text(translation, find_experiment(options.exp).name))
    return 0


def _pax(options: argparse.Namespace) -> int:
    texts = _texts(options.files)
    translations, others = translate_pax(texts, read_tables(), options.classes)
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
