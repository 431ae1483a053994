"""Writes a configuration of MaxText or Pax as an experiment of ours.

    python -m layerkit_runner.tools.translate maxtext FILE.yml… [KEY=VALUE…]     a class
    python -m layerkit_runner.tools.translate maxtext FILE.yml… [KEY=VALUE…] --exp=NAME
                                                 the command that runs NAME with these values
    python -m layerkit_runner.tools.translate pax FILE.py… [--class=NAME…]       classes

Neither MaxText nor Pax needs to be installed; nothing of the files is run. Later files and words
win. What has no counterpart is named on the error stream and in a comment of the class, which is
then abstract and does not run; classes of Pax that are left out are named as well.

Exit codes: 0 all is translated, 1 something is left over, 2 the command line is wrong, or a command
was asked for that cannot say all.
"""

from __future__ import annotations

import argparse
import keyword
import sys
from collections.abc import Sequence
from pathlib import Path

from layerkit_runner.config.overrides import Override, parse_fields
from layerkit_runner.config.registry import find_experiment
from layerkit_runner.errors import FieldError, UsageError
from layerkit_runner.files.bounded_documents import DocumentError, read_text
from layerkit_runner.tools.translate.maxtext import read_values, translate_maxtext
from layerkit_runner.tools.translate.pax import other_classes, translate_pax
from layerkit_runner.tools.translate.written import Translation, command_text, modules_text


def main(arguments: Sequence[str] | None = None) -> int:
    """Does what the command line says, and returns the exit code.

    Args:
      arguments: its words, without the program's name; those of this process by default.
    """
    options = _parser().parse_args(arguments)
    try:
        return _maxtext(options) if options.framework == "maxtext" else _pax(options)
    except (UsageError, OSError) as error:
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
    maxtext.add_argument("words", nargs="+", metavar="FILE.yml or KEY=VALUE")
    maxtext.add_argument(
        "--defaults", metavar="FILE.yml", help="MaxText's own base.yml, for what the others omit"
    )
    maxtext.add_argument("--name", default="FromMaxText", help="of the class", metavar="NAME")
    maxtext.add_argument(
        "--exp", metavar="NAME", help="print the command that runs this experiment with the values"
    )
    maxtext.add_argument(
        "--devices_per_slice", type=int, metavar="N", help="what a parallelism of -1 fills up to"
    )
    maxtext.add_argument(
        "--ignore", default="", metavar="KEYS", help="keys to leave out, with commas between"
    )
    pax = frameworks.add_parser("pax", help="Python files of experiments", allow_abbrev=False)
    pax.add_argument("files", nargs="+", metavar="FILE.py")
    pax.add_argument(
        "--class",
        dest="classes",
        action="append",
        metavar="NAME",
        help="which; repeatable (default: the registered, or else all that no other inherits)",
    )
    return parser


def _maxtext(options: argparse.Namespace) -> int:
    if not options.name.isidentifier() or keyword.iskeyword(options.name):
        raise UsageError(f"--name={options.name}: no class can be called so")
    files = [word for word in options.words if "=" not in word]
    words = [word for word in options.words if "=" in word]
    values = read_values(_texts(files), words)
    for key in options.ignore.split(",") if options.ignore else ():
        if key not in values:
            raise UsageError(f"--ignore={key}: neither files nor words have it")
        del values[key]
    defaults = None
    if options.defaults is not None:
        defaults = read_values(_texts([options.defaults]), [])
    translation = translate_maxtext(
        values,
        name=options.name,
        defaults=defaults,
        devices_per_slice=options.devices_per_slice,
    )
    if options.exp is None:
        return _write([translation], "MaxText")
    return _command(translation, options.exp)


def _command(translation: Translation, name: str) -> int:
    leftovers = [f"  {leftover}" for leftover in translation.leftovers]
    if leftovers:
        told = "\n".join(leftovers)
        raise UsageError(f"no command says what these say; --ignore leaves them out:\n{told}")
    entry = find_experiment(name)
    if entry.complete:
        annotations = {field: found.annotation for field, found in entry.fields.items()}
        overrides = [Override(field, str(value)) for field, value in translation.fields.items()]
        try:
            parse_fields(entry.name, annotations, overrides)
        except FieldError as error:
            raise UsageError(f"{entry.name} cannot run with these values: {error}") from error
    print(command_text(translation, entry.name))
    return 0


def _pax(options: argparse.Namespace) -> int:
    texts = _texts(options.files)
    code = _write(translate_pax(texts, options.classes), "Pax")
    others = [] if options.classes is not None else other_classes(texts)
    if others:
        told = f"left out: {', '.join(others)}; --class=NAME writes one"
        print(f"translate: {told}", file=sys.stderr)
    return code


def _texts(files: Sequence[str]) -> dict[str, str]:
    """What files hold, by their names; one that is named twice has its last place."""
    texts: dict[str, str] = {}
    for file in files:
        texts.pop(file, None)
        try:
            texts[file] = read_text(Path(file))
        except DocumentError as error:
            raise UsageError(f"{file}: {error}") from error
    return texts


def _write(translations: Sequence[Translation], source: str) -> int:
    print(modules_text(translations, source), end="")
    for translation in translations:
        for leftover in translation.leftovers:
            print(f"translate: {translation.name}: not translated: {leftover}", file=sys.stderr)
        if translation.leftovers:
            told = f"{translation.name} is abstract and does not run until these are settled"
            print(f"translate: {told}", file=sys.stderr)
    return 1 if any(translation.leftovers for translation in translations) else 0


if __name__ == "__main__":
    sys.exit(main())
