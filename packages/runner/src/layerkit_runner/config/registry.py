"""The experiments that packages offer: lookup by name, and the text of `--list`.

`--exp=lm.pile.Pile126M` means, in this order:

1. an experiment of that name in a package of the entry-point group `layerkit.experiments`, or the
   one whose full name ends so (`pile.Pile126M`);
2. a class of that full dotted name, anywhere on the Python path or below the current folder.

Names of Pax's documents are valid, too; see `config.flags`.

Importing experiments takes seconds, so both read `catalogue.json` beside a package's `__init__.py`,
which `layerkit_runner.tools.catalogue` writes. A name that the catalogue lacks imports its module.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import os
import pkgutil
import sys
import types
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerkit.errors import UserError
from layerkit_runner.config import flags
from layerkit_runner.errors import UsageError, line_of, naming_code, to_usage_error
from layerkit_runner.files.text import draw_table, scaled_text

if TYPE_CHECKING:
    from layerkit_runner.config.experiment import BaseExperiment

ENTRY_POINT_GROUP = "layerkit.experiments"
CATALOGUE_FILE = "catalogue.json"

_HEADINGS = ("NAME", "WEIGHTS", "MESH", "DATA", "SUMMARY")


# Begins the summary of an experiment that a module offers under a second name.
_SAME_AS = "The same as "


@dataclasses.dataclass(frozen=True)
class CatalogueLine:
    """Facts about an experiment that are available without building it; None if unknown."""

    num_params: int | None
    mesh: str | None
    data: str | None
    summary: str = ""
    tags: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class ExperimentEntry:
    """An experiment as `--list` shows it: its name without the package that offers it."""

    name: str
    dotted: str
    line: CatalogueLine

    @property
    def module(self) -> str:
        """Name of the module that has the class."""
        return self.dotted.rpartition(".")[0]

    @property
    def class_name(self) -> str:
        """Name of the class in its module."""
        return self.dotted.rpartition(".")[2]

    @property
    def is_hidden(self) -> bool:
        """Whether `--list` shows this only with a tag: a speed test, or a second name."""
        return "speed_test" in self.line.tags or self.line.summary.startswith(_SAME_AS)


def experiment_packages() -> list[str]:
    """Return the names of the packages that offer experiments."""
    # Imported here because it takes some 40 ms, which `--help` need not wait for.
    from importlib import metadata

    points = metadata.entry_points(group=ENTRY_POINT_GROUP)
    return list(dict.fromkeys(point.value.partition(":")[0] for point in points))


def list_experiments(*, tags: Collection[str] = ()) -> list[ExperimentEntry]:
    """Return the experiments that the packages offer, by name; abstract ones are left out.

    Args:
      tags: Tags that a listed experiment must have, all of them.

    Raises:
      UsageError: No experiment has one of the tags.
    """
    entries = _index(experiment_packages()).values()
    known = sorted({tag for entry in entries for tag in entry.line.tags})
    for tag in tags:
        if tag not in known:
            raise UsageError("no experiment has the tag", field="--tag", value=tag, choices=known)
    chosen = [entry for entry in entries if set(tags) <= set(entry.line.tags)]
    return sorted(chosen, key=lambda entry: entry.name)


def catalogue_text(entries: Sequence[ExperimentEntry]) -> str:
    """Return the text that `--list` prints: a line for each experiment.

    A terminal shows headings.
    """
    columns = zip(_HEADINGS, zip(*map(_listed_cells, entries), strict=True), strict=True)
    # Empty columns are left out.
    heads, cells = zip(*((head, column) for head, column in columns if any(column)), strict=True)
    heads = heads if sys.stdout.isatty() else ()
    return "\n".join(draw_table(zip(*cells, strict=True), head=heads))


def catalogue_json(entries: Sequence[ExperimentEntry]) -> list[dict[str, Any]]:
    """Return the objects that `--list --json` prints; unknown values are None."""
    return [
        {"name": entry.name, "class": entry.dotted, **dataclasses.asdict(entry.line)}
        for entry in entries
    ]


def _listed_cells(entry: ExperimentEntry) -> tuple[str, str, str, str, str]:
    line = entry.line
    unknown = "" if line.mesh is None else "—"
    count = unknown
    if line.num_params is not None:
        count = scaled_text(line.num_params, ["", "K", "M", "B"]).replace(" ", "")
    return entry.name, count, line.mesh or "", line.data or "", line.summary


def find_experiment(name: str, *, flag: str = "--exp") -> ExperimentEntry:
    """Return the experiment that a name means; `load_experiment` imports it.

    Raises:
      UsageError: There is no such experiment, or several have the name.
    """
    packages, spelling = experiment_packages(), flags.experiment_name(name)
    catalogued = _catalogued(packages)
    dotted = [*(f"{package}.{spelling}" for package in packages), spelling]
    entries = [catalogued.get(full) or _imported_entry(full, packages) for full in dotted]
    matches = {entry.dotted: entry for entry in entries if entry is not None}
    index = {} if matches else _index(packages)
    matches |= {full: entry for full, entry in index.items() if full.endswith(f".{spelling}")}
    if len(matches) > 1:
        expected = f"one of {', '.join(sorted(matches))}"
        raise UsageError("ambiguous name", field=flag, value=name, expected=expected)
    if matches:
        return matches.popitem()[1]
    raise UsageError(
        "unknown experiment",
        field=flag,
        value=name,
        choices=_choices(spelling, index),
        hint="`runner --list` prints all. Your own modules are found in the current folder and in"
        " PYTHONPATH.",
    )


def _choices(name: str, index: Mapping[str, ExperimentEntry]) -> list[str]:
    """Return names that a misspelled one may mean: of its module, of its package, or of all."""
    module, _, class_name = name.rpartition(".")
    if not module:  # A bare class name is too unlike a whole dotted one.
        return [entry.class_name for entry in index.values()]
    if module in sys.modules:
        return [f"{module}.{name}" for name in _class_names(sys.modules[module])]
    names = [entry.name for entry in index.values()]
    if inside := [inner for inner in names if inner.startswith(f"{name}.")]:
        return inside
    names += [f"{path.stem}.{class_name}" for path in Path.cwd().glob("*.py")]
    if (spec := _spec(module.partition(".")[0])) is not None:
        inner = pkgutil.iter_modules(spec.submodule_search_locations or [])
        names += [f"{spec.name}.{info.name}.{class_name}" for info in inner]
    return names


def load_experiment(entry: ExperimentEntry) -> type[BaseExperiment]:
    """Import the class of an experiment."""
    from layerkit_runner.config.experiment import BaseExperiment

    module = _imported(entry.module)
    cls = getattr(module, entry.class_name, None)
    if not isinstance(cls, type) or not issubclass(cls, BaseExperiment) or cls._is_abstract:
        names = [f"{entry.module}.{name}" for name in _class_names(module)]
        expected = "a class derived from BaseExperiment that is not abstract"
        choices = [name for name in names if name != entry.dotted]
        raise UsageError(field="--exp", value=entry.dotted, expected=expected, choices=choices)
    return cls


def experiment_classes(package: str) -> dict[str, type[BaseExperiment]]:
    """Import the modules of a package and return the experiments that run, by full name.

    A second name in the module of a class counts as well; tests are left out.
    """
    from layerkit_runner.config.experiment import BaseExperiment

    classes: dict[str, type[BaseExperiment]] = {}
    module = _imported(package)
    for name, value in vars(module).items():
        if (
            isinstance(value, type)
            and issubclass(value, BaseExperiment)
            and value.__module__ == package
            and not value._is_abstract
            and not name.startswith("_")
        ):
            classes[f"{package}.{name}"] = value
    for inner in pkgutil.iter_modules(getattr(module, "__path__", ())):
        if inner.name != "tests":
            classes |= experiment_classes(f"{package}.{inner.name}")
    return classes


def entry_of(cls: type[BaseExperiment], dotted: str, packages: Collection[str]) -> ExperimentEntry:
    """Return the entry of an experiment class, which is not built."""
    from layerkit_runner.config.experiment import experiment_summary, experiment_tags

    name, summary = f"{cls.__module__}.{cls.__qualname__}", experiment_summary(cls)
    if dotted != name:
        summary = f"{_SAME_AS}{_short(name, packages)}."
    line = CatalogueLine(None, None, None, summary, experiment_tags(cls))
    return ExperimentEntry(_short(dotted, packages), dotted, line)


def _catalogued(packages: Collection[str]) -> dict[str, ExperimentEntry]:
    """Return the experiments in the catalogues of packages, by full name."""
    return {
        f"{package}.{name}": ExperimentEntry(name, f"{package}.{name}", line)
        for package in packages
        for name, line in (_catalogue(package) or {}).items()
    }


def _index(packages: Collection[str]) -> dict[str, ExperimentEntry]:
    """Return the experiments of packages, by full name; those without a catalogue are imported."""
    index = _catalogued(packages)
    for package in packages:
        if _catalogue(package) is None:
            for dotted, cls in experiment_classes(package).items():
                index[dotted] = entry_of(cls, dotted, packages)
    names = [entry.name for entry in index.values()]
    # Two packages may have experiments of one name, which are then shown with the package.
    return {
        dotted: dataclasses.replace(entry, name=dotted) if names.count(entry.name) > 1 else entry
        for dotted, entry in index.items()
    }


def _catalogue(package: str) -> dict[str, CatalogueLine] | None:
    spec = _spec(package)
    folders = None if spec is None else spec.submodule_search_locations
    return read_catalogue(next(iter(folders or []), ""))


def read_catalogue(folder: str | os.PathLike[str]) -> dict[str, CatalogueLine] | None:
    """Return the catalogue in a package's folder, by names; None if there is no file."""
    path = os.path.join(folder, CATALOGUE_FILE)
    if not os.path.isfile(path):
        return None
    with open(path, "rb") as file:
        content = file.read()
    try:
        rows = json.loads(content)
        return {name: CatalogueLine(**{**r, "tags": tuple(r["tags"])}) for name, r in rows.items()}
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise UsageError(f"not a catalogue of experiments: {error!r}", owner=path) from None


def _imported_entry(dotted: str, packages: Collection[str]) -> ExperimentEntry | None:
    """Import the module of a full dotted name; return the entry, or None if it has no such name."""
    module, _, name = dotted.rpartition(".")
    if not module or _spec(module) is None or not hasattr(_imported(module), name):
        return None
    return ExperimentEntry(_short(dotted, packages), dotted, CatalogueLine(None, None, None))


def _class_names(module: types.ModuleType) -> list[str]:
    return [name for name, value in vars(module).items() if isinstance(value, type)]


def _spec(module: str) -> importlib.machinery.ModuleSpec | None:
    try:
        return importlib.util.find_spec(module)
    except (ImportError, ValueError):  # a package above it is missing
        return None


@naming_code()
def _imported(name: str) -> types.ModuleType:
    """Return a module."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise UsageError(f"cannot be imported: {error}", owner=name) from error
    except SyntaxError as error:
        raise UsageError(error.msg, owner=f"{error.filename}:{error.lineno}") from None
    except UserError as error:
        raise to_usage_error(error, owner=line_of(error)) from error


def _short(dotted: str, packages: Collection[str]) -> str:
    for package in packages:
        if dotted.startswith(package + "."):
            return dotted.removeprefix(package + ".")
    return dotted
