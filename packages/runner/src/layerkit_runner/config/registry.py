"""Experiments by name, found without importing them.

`--exp=lm.pile.Pile126M` means, in this order:

1. that class inside a package which offers experiments (any installed distribution can name one in
   the entry-point group `layerkit.experiments`), or a class of that full dotted name, anywhere on
   the Python path or below the current folder;
2. the names that Pax's documents use, such as `tasks.lm.params.lm_cloud.LmCloudSpmd`;
3. the one experiment of the offering packages whose full name ends so (`pile.Pile126M`).
"""

from __future__ import annotations

import ast
import collections
import dataclasses
import importlib
import importlib.util
import inspect
import os
import re
import traceback
import types
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from layerkit.near_names import near_names
from layerkit_runner.config.catalogue import CatalogueLine, read_catalogue
from layerkit_runner.config.class_sources import (
    Alias,
    CannotTellError,
    ClassSource,
    ClassSources,
    FieldSource,
    Lineage,
)
from layerkit_runner.errors import FieldError, UsageError, first_names

if TYPE_CHECKING:
    from layerkit_runner.config.experiment import BaseExperiment

ENTRY_POINT_GROUP = "layerkit.experiments"
_OWN_PACKAGE = "layerkit_experiments"
_ROOT = "layerkit_runner.config.experiment.BaseExperiment"

# Where the experiments of Pax's documents stand here.
_PAX_NAMES = (
    (re.compile(r"(paxml\.)?tasks\.(\w+)\.params\."), r"\2."),
    (re.compile(r"paxml\.contrib\.gpu\.scripts_gpu\.configs\."), "lm.pile."),
)


@dataclasses.dataclass(frozen=True)
class ExperimentEntry:
    """What is known of an experiment before it is imported."""

    # As `--list` shows it: without the name of the package that offers it.
    name: str
    module: str
    class_name: str
    # The first line of its docstring.
    summary: str
    fields: Mapping[str, FieldSource]
    # Whether `fields` are all there are; False where only an import would tell.
    complete: bool
    is_abstract: bool = False
    # Its own and those of its bases, as far as `complete` goes.
    tags: tuple[str, ...] = ()
    # What the package's catalogue tells of it; known where experiments are listed.
    line: CatalogueLine | None = None

    @property
    def dotted(self) -> str:
        """The full name of the class."""
        return f"{self.module}.{self.class_name}"


def experiment_packages() -> list[str]:
    """Packages that offer experiments, `layerkit_experiments` last if it is there."""
    # Imported here because it costs some 40 ms, which `--help` need not pay.
    from importlib import metadata

    names = [p.value.partition(":")[0] for p in metadata.entry_points(group=ENTRY_POINT_GROUP)]
    if importlib.util.find_spec(_OWN_PACKAGE) is not None:
        names.append(_OWN_PACKAGE)
    return list(dict.fromkeys(names))


def list_experiments(*, tags: Collection[str] = ()) -> list[ExperimentEntry]:
    """Every experiment that the packages offer, by name; abstract ones are left out.

    Args:
      tags: What an experiment must have to be listed, all of them.

    Raises:
      UsageError: a tag that no experiment has.
    """
    sources, packages = ClassSources(), experiment_packages()
    lines = {
        f"{package}.{name}": line
        for package in packages
        for folder in sources.folders(package)
        for name, line in read_catalogue(folder).items()
    }
    entries = [
        dataclasses.replace(entry, line=lines.get(entry.dotted))
        for entry in _offered(sources, packages).values()
    ]
    _check_tags(tags, sorted({tag for entry in entries for tag in entry.tags}))
    entries = [entry for entry in entries if set(tags) <= set(entry.tags)]
    return sorted(entries, key=lambda entry: entry.name)


def _check_tags(tags: Collection[str], known: Collection[str]) -> None:
    for tag in tags:
        if tag not in known:
            all_tags = f"It is one of {', '.join(known)}." if known else "There are none."
            raise UsageError(f"--tag has no value {tag!r}{near_names(tag, known)} {all_tags}")


def find_experiment(name: str) -> ExperimentEntry:
    """The experiment that `name` means.

    Raises:
      UsageError: there is none, with the nearest names; there are several, with all of them; or it
        is only a base for others.
    """
    sources, packages = ClassSources(), experiment_packages()
    for spelling in dict.fromkeys([name, _from_pax(name)]):
        exact = [*(f"{package}.{spelling}" for package in packages), spelling]
        found = [entry for d in exact if (entry := _find(sources, d, packages)) is not None]
        if found:
            return _the_only(name, found)
    offered = _offered(sources, packages)
    ending = [entry for full, entry in offered.items() if full.endswith("." + _from_pax(name))]
    if ending:
        return _the_only(name, ending)
    raise UsageError(_unknown(sources, name, [entry.name for entry in offered.values()]))


def load_experiment(entry: ExperimentEntry) -> type[BaseExperiment]:
    """Imports the experiment's class.

    Raises:
      UsageError: something that its module imports is not installed, or a class of an experiment
        is refused as it is made.
    """
    try:
        module = _imported(entry.module)
    except ModuleNotFoundError as error:
        raise UsageError(f"{entry.name} cannot be imported: {error} ({entry.module}).") from error
    return getattr(module, entry.class_name)


def _imported(name: str) -> types.ModuleType:
    """The module; a class in it that is refused is refused by file and line."""
    from layerkit_runner.config import experiment

    try:
        return importlib.import_module(name)
    except (experiment.ExperimentClassError, FieldError) as error:
        frames = traceback.extract_tb(error.__traceback__)
        theirs = [frame for frame in frames if frame.filename != experiment.__file__]
        place = f"{os.path.relpath(theirs[-1].filename)}:{theirs[-1].lineno}"
        raise experiment.ExperimentClassError(f"{place}: {error}") from error


def _find(sources: ClassSources, dotted: str, packages: list[str]) -> ExperimentEntry | None:
    """The experiment of exactly that full name, if there is one."""
    try:
        cls = sources.find_class(dotted)
    except CannotTellError:
        return _entry_by_import(dotted, packages)
    if cls is None:
        return None
    lineage = sources.lineage(cls)
    entry = _entry(cls, lineage, packages)
    if entry is None and not lineage.complete:
        entry = _entry_by_import(dotted, packages)
    if entry is None:
        raise UsageError(
            f"{dotted} is a class but no experiment: it does not derive from BaseExperiment."
        )
    return entry


def _entry(cls: ClassSource, lineage: Lineage, packages: list[str]) -> ExperimentEntry | None:
    if not any(base.dotted == _ROOT for base in lineage.classes[1:]):
        return None
    return ExperimentEntry(
        name=_short(cls.dotted, packages),
        module=cls.module,
        class_name=cls.node.name,
        summary=cls.summary,
        fields=lineage.fields(),
        complete=lineage.complete,
        is_abstract=cls.is_abstract,
        tags=lineage.tags(),
    )


def _entry_by_import(dotted: str, packages: list[str]) -> ExperimentEntry | None:
    """The fall-back where the source does not show what the name is."""
    from layerkit_runner.config.experiment import BaseExperiment, experiment_fields

    module_name, _, class_name = dotted.rpartition(".")
    try:
        found = getattr(_imported(module_name), class_name, None)
    except ModuleNotFoundError:
        return None
    if not (isinstance(found, type) and issubclass(found, BaseExperiment)):
        return None
    return ExperimentEntry(
        name=_short(dotted, packages),
        module=module_name,
        class_name=class_name,
        summary=inspect.cleandoc(found.__doc__ or "").partition("\n")[0],
        fields={n: FieldSource(text, None) for n, text in experiment_fields(found).items()},
        complete=True,
        is_abstract=found._is_abstract,
        tags=tuple(sorted({tag for base in found.__mro__ for tag in vars(base).get("tags", ())})),
    )


def _offered(sources: ClassSources, packages: list[str]) -> dict[str, ExperimentEntry]:
    """What can be run from these packages or modules, by full name; second names count too."""
    offered: dict[str, ExperimentEntry] = {}
    for package in packages:
        for name in sources.modules_below(package) or [package]:
            module = sources.module(name)
            for local, bound in module.bindings.items() if module is not None else ():
                if isinstance(bound, (Alias, ast.ClassDef)) and not local.startswith("_"):
                    entry = _entry_in(sources, name, local, packages)
                    if entry is not None and not entry.is_abstract:
                        offered[f"{name}.{local}"] = entry
    by_name = collections.Counter(entry.name for entry in offered.values())
    return {
        full: dataclasses.replace(entry, name=full) if by_name[entry.name] > 1 else entry
        for full, entry in offered.items()
    }


def _entry_in(
    sources: ClassSources, module: str, local: str, packages: list[str]
) -> ExperimentEntry | None:
    """The experiment that a module calls `local`, as far as the source shows it."""
    try:
        cls = sources.find_class(f"{module}.{local}")
    except CannotTellError:
        return None
    entry = None if cls is None else _entry(cls, sources.lineage(cls), packages)
    if entry is None or entry.dotted == f"{module}.{local}":
        return entry
    summary = f"The same as {entry.name}."
    return dataclasses.replace(entry, name=_short(f"{module}.{local}", packages), summary=summary)


def _the_only(name: str, entries: list[ExperimentEntry]) -> ExperimentEntry:
    by_class = {entry.dotted: entry for entry in entries}
    if len(by_class) > 1:
        candidates = "".join(f"\n  {dotted}" for dotted in sorted(by_class))
        raise UsageError(f"--exp={name} is ambiguous; it can be any of{candidates}")
    entry = entries[0]
    if entry.is_abstract:
        raise UsageError(
            f"{entry.name} is only a base for other experiments (declared abstract, or named with "
            "an underscore); `runner --list` shows those that run."
        )
    return entry


def _unknown(sources: ClassSources, name: str, offered: list[str]) -> str:
    module, _, class_name = name.rpartition(".")
    try:
        own = sources.module(module) if module else None
    except CannotTellError:
        own = None
    if own is not None:
        # Somebody's own module: then one of its classes is what was meant.
        names = [full.rpartition(".")[2] for full in _offered(sources, [module])]
        return (
            f"module {module} has no experiment {class_name!r}{near_names(class_name, names)}"
            f"{f' It has: {first_names(names)}.' if names else ''}"
        )
    hint = near_names(_from_pax(name), offered)
    if hint == ".":
        # A bare class name is too unlike a whole dotted one; compare it with class names.
        hint = near_names(class_name, [other.rpartition(".")[2] for other in offered])
    return f"there is no experiment {name!r}{hint} `runner --list` shows all."


def _from_pax(name: str) -> str:
    for pattern, replacement in _PAX_NAMES:
        if pattern.match(name):
            return pattern.sub(replacement, name, count=1)
    return name


def _short(dotted: str, packages: list[str]) -> str:
    for package in packages:
        if dotted.startswith(package + "."):
            return dotted.removeprefix(package + ".")
    return dotted
