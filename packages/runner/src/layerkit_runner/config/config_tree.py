"""Trees of configs: iteration over them, access to their values by path, and their text.

A path is names and indices joined by dots, such as `datasets.0.batch_size`, through the fields of
configs and through lists, tuples and dicts.

A resolved experiment is printed by `--mode=inspect` and recorded by a run, as text and as JSON. The
text has a line `path = value` for each field at any depth, with the path of `--fdl.PATH=VALUE`. The
value of a config is the name of its class, or `the same as PATH` if it appears again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import importlib
import inspect
import json
import sys
from collections.abc import Collection, Iterator
from typing import Any

from layerkit.config import (
    Config,
    assigned_fields,
    changed_fields,
    field_names,
    field_types,
    is_config,
    target_of,
)
from layerkit.errors import first_names
from layerkit_runner.config.experiment import experiment_fields
from layerkit_runner.config.requests import ROOTS, Override, ResolvedExperiment, to_argv
from layerkit_runner.errors import UsageError, recast
from layerkit_runner.files.text import stable_repr
from layerkit_runner.run_options import RunOptions

NOT_SET = "(not set)"


def children(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of a config's fields, or of what a list, tuple or dict holds."""
    if is_config(value):
        for name in dict.fromkeys([*field_names(value), *assigned_fields(value)]):
            yield str(name), field_value(value, name)
    elif isinstance(value, dict):
        yield from ((str(key), item) for key, item in value.items())
    elif isinstance(value, (list, tuple)):
        yield from ((str(index), item) for index, item in enumerate(value))


def configs_in(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the outermost configs in a value and the paths to them."""
    if is_config(value):
        yield path, value
        return
    for name, item in children(value):
        yield from configs_in(item, f"{path}.{name}" if path else name)


def walk(value: Any, path: str, seen: dict[int, str] | None = None) -> Iterator[tuple[str, Any]]:
    """Yield each path in a tree of configs with its value, outer ones first.

    A list or dict without a config in it is one value. A config that was yielded before, at another
    path, is yielded again without what it holds; `seen` has the first paths by identity.
    """
    seen = {} if seen is None else seen
    is_repeated = is_config(value) and id(value) in seen
    if is_config(value) or not any(configs_in(value)):
        yield path, value
    if is_config(value):
        seen.setdefault(id(value), path)
    if not is_repeated and any(configs_in(value)):
        for name, item in children(value):
            yield from walk(item, f"{path}.{name}", seen)


def field_value(config: Any, name: str) -> Any:
    """Return the value of a config's field, which may be its default, or `NOT_SET`."""
    try:
        value = getattr(config, name)
    except (AttributeError, TypeError, ValueError):
        return NOT_SET
    return NOT_SET if value is inspect.Parameter.empty else value


def target_name(config: Any) -> str:
    """Return the name of the class or function that a config describes a call of."""
    target = target_of(config)
    return getattr(target, "__qualname__", repr(target))


class Name(str):
    """Text that is printed without quotes, such as the name of a class."""


def plain_value(value: Any) -> Any:
    """Return a value if JSON can represent it, or else its text."""
    if isinstance(value, (list, tuple)):
        return [plain_value(item) for item in value]
    if isinstance(value, dict):
        return {str(key): plain_value(item) for key, item in value.items()}
    is_finite = not isinstance(value, float) or abs(value) < float("inf")
    if type(value) in (bool, int, float, str, type(None)) and is_finite:
        return value
    return value_text(value)


def value_text(value: Any) -> str:
    """Return the text of a value, in one line."""
    if isinstance(value, Name):
        return str(value)
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        inner = ", ".join(value_text(item) for item in value)
        if isinstance(value, list):
            return f"[{inner}]"
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{value_text(k)}: {value_text(v)}" for k, v in value.items()) + "}"
    if isinstance(value, enum.Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    return stable_repr(value)


def check_class(config: Config, path: str, base: type) -> None:
    """Raise `UsageError` unless a config makes a `base`."""
    kind = target_of(config)
    if not (isinstance(kind, type) and issubclass(kind, base)):
        name = getattr(kind, "__qualname__", repr(kind))
        raise UsageError(field=path, value=name, expected=f"a config of {base.__name__}")


def check_required_fields(config: Config, path: str, *, by_job: Collection[str]) -> None:
    """Check that an experiment sets the fields of a config that need a value, and no others."""
    kind, assigned = target_of(config), assigned_fields(config)
    if taken := [name for name in assigned if name in by_job]:
        raise UsageError("the job sets this field", field=f"{path}.{taken[0]}", expected="no value")
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    parameters = [p for p in inspect.signature(kind).parameters.values() if p.kind not in kinds]
    needed = [p.name for p in parameters if p.default is p.empty and p.name not in by_job]
    if missing := [name for name in needed if name not in assigned]:
        owner = f"{path} ({kind.__qualname__})"
        raise UsageError("missing value", owner=owner, field=first_names(missing))


# Packages whose functions make optimizers and schedules, and do nothing else.
_OPTIMIZERS = ("optax.", "layerkit_runner.optim.")


def _is_like(cls: Any, old: Any) -> bool:
    """Return whether a class shares a base with the class `old`, or a function makes optimizers."""
    if not isinstance(cls, type):
        return f"{getattr(cls, '__module__', None)}.".startswith(_OPTIMIZERS)
    shared = {*cls.__mro__} & {*getattr(old, "__mro__", ())} - {object}
    return any(base.__module__ not in sys.stdlib_module_names for base in shared)


def _is_number(text: str, annotation: str | None) -> bool:
    """Return whether a text is a number and the annotation of the field names numbers."""
    if annotation in (None, "Any"):
        return False
    try:
        return isinstance(field_types.parse_value(text, annotation), int | float)
    except field_types.FieldTypeError:
        return False


class PathSetter:
    """Sets overrides; each walks down its path and rebuilds containers on the way back."""

    def __init__(self) -> None:
        """Create a setter that has set no path."""
        # The override that has set a path below a config, to find two paths to a shared config.
        self._owners: dict[tuple[int, str], Override] = {}
        self._override = Override("", "")
        self.notes: list[str] = []
        """Lines about fields of configs whose class an override has replaced."""

    def set(self, root: Any, override: Override) -> Any:
        """Return the root with the value of an override set below it."""
        self._override = override
        name, *rest = override.parts
        return self._set(root, rest, name)

    def _set(self, node: Any, rest: list[str], here: str, *, annotation: str | None = None) -> Any:
        if not rest:
            return self._parse(node, here, annotation)
        name, *deeper = rest
        path = f"{here}.{name}"
        if is_config(node):
            annotations = field_types.field_annotations(target_of(node))
            if name not in annotations and name not in assigned_fields(node):
                raise self._error(
                    f"unknown field of {here} ({target_name(node)})",
                    value=name,
                    choices=field_types.field_choices(target_of(node)),
                )
            child = field_value(node, name)
            if is_config(child) and deeper:
                self._set(child, deeper, path)
                return node
            self._claim(node, rest)
            value = self._set(child, deeper, path, annotation=annotations.get(name))
            try:
                setattr(node, name, value)
            except field_types.FieldTypeError as error:
                raise self._mismatch(error, path) from None
            return node
        if isinstance(node, dict):
            keys = {str(key): key for key in node}
            if name not in keys:
                raise self._error(f"unknown key of {here}", value=name, choices=keys)
            value = self._set(node[keys[name]], deeper, path)
            return type(node)({**node, keys[name]: value})
        if isinstance(node, (list, tuple)):
            items = list(node)
            if not name.isdecimal() or int(name) >= len(items):
                expected = f"an index below {len(items)}" if items else "no path, since it is empty"
                raise self._error(field=here, value=name, expected=expected)
            index = int(name)
            items[index] = self._set(items[index], deeper, path)
            return type(node)(*items) if hasattr(node, "_fields") else type(node)(items)
        raise self._error("no fields below this value", field=here, value=node)

    def _parse(self, old: Any, here: str, annotation: str | None) -> Any:
        text = self._override.text
        if is_config(old) and text != "None" and not _is_number(text, annotation):
            return self._replace_class(old, here)
        try:
            return field_types.parse_value(text, annotation)
        except field_types.FieldTypeError as error:
            raise self._mismatch(error, here) from None

    def _replace_class(self, old: Any, here: str) -> Any:
        """Return a config of the class that the override names, with the fields that both have."""
        module, _, name = self._override.text.rpartition(".")
        cls: Any = None
        with contextlib.suppress(ImportError):
            cls = getattr(importlib.import_module(module), name, None) if module else None
        if not callable(cls):
            example = next(iter(field_names(old)), "NAME")
            raise self._error(
                field=here,
                value=self._override.text,
                expected="the full name of a class, such as layerkit.layers.RmsNorm, or a path to a"
                f" field, such as {here}.{example}",
            )
        if self._override.is_recorded and not _is_like(cls, target_of(old)):
            raise self._error(
                field=here,
                value=self._override.text,
                expected=f"a class with a base of {target_name(old)}, or a function of optax, since"
                " another one could run any code",
                hint=f"If you trust the record of the job folder, give the flag {self._override}",
            )
        new, kept, dropped = type(old)(cls), [], []
        for field, value in changed_fields(old).items():
            try:
                setattr(new, field, value)
                kept.append(field)
            except TypeError:  # no such field, or a value of another type
                dropped.append(field)
        note = f"{here} is now {target_name(new)}; kept from {target_name(old)}: "
        note += ", ".join(kept) or "nothing"
        self.notes.append(f"{note}; DROPPED: {', '.join(dropped)}" if dropped else note)
        return new

    def _mismatch(self, error: field_types.FieldTypeError, path: str) -> UsageError:
        owner = None if path == self._override.path else f"--fdl.{self._override.path}"
        field = path if owner else f"--fdl.{path}"
        return recast(UsageError, error, owner=owner, field=field)

    def _claim(self, config: Any, rest: list[str]) -> None:
        earlier = self._owners.setdefault((id(config), ".".join(rest)), self._override)
        if earlier.text != self._override.text:
            raise UsageError(
                "contradictory flags",
                field=f"{earlier} and {self._override}",
                expected="one of them",
                hint=f"Both paths lead to the same {target_name(config)}.",
            )

    def _error(self, problem: str = "", **data: Any) -> UsageError:
        return UsageError(problem, owner=f"--fdl.{self._override.path}", **data)


def config_text(resolved: ResolvedExperiment) -> str:
    """Return lines `path = value`: the experiment, its fields, then the resolved configs."""
    lines = [f"experiment = {resolved.name}"]
    for name, value in _experiment_values(resolved):
        lines.append(f"experiment.{name} = {value_text(value)}")
    lines.extend(f"{path} = {value_text(value)}" for path, value in _walk(resolved))
    return "\n".join(lines) + "\n"


def config_json(
    resolved: ResolvedExperiment, options: RunOptions | None = None, *, mode: str = "train"
) -> dict[str, Any]:
    """Return a resolved experiment as JSON, with the arguments that resolve it again.

    `options` is None if there is no run. Values that JSON cannot represent are texts.
    """
    # `--json` selects the format of this output and is not part of the run.
    run = [] if options is None else to_argv(dataclasses.replace(options, json=False), mode=mode)
    named = [] if options is None or mode == "train" else [f"--mode={mode}"]
    fields = {name: override_text(value) for name, value in resolved.experiment.overrides.items()}
    overrides = fields | {o.path: o.text for o in resolved.deep_overrides}
    return {
        "experiment": resolved.name,
        "overrides": overrides,
        "arguments": [
            f"--exp={resolved.name}",
            *(f"--fdl.{path}={text}" for path, text in overrides.items()),
            *named,
            *run,
        ],
        "fields": {name: plain_value(value) for name, value in _experiment_values(resolved)},
        "config": {path: plain_value(value) for path, value in _walk(resolved)},
    }


def printed_config(
    resolved: ResolvedExperiment, options: RunOptions | None, *, mode: str, as_json: bool
) -> str:
    """Return the text that `--print_config` prints; see `config_text` and `config_json`."""
    if as_json:
        return json.dumps(config_json(resolved, options, mode=mode))
    return config_text(resolved).rstrip("\n")


def _experiment_values(resolved: ResolvedExperiment) -> Iterator[tuple[str, Any]]:
    for name in experiment_fields(type(resolved.experiment)):
        yield name, getattr(resolved.experiment, name)


def _walk(resolved: ResolvedExperiment) -> Iterator[tuple[str, Any]]:
    seen: dict[int, str] = {}
    for root in ROOTS:
        value = getattr(resolved, root)
        if value is None or (root == "observers" and not value):
            continue
        for path, node in walk(value, root, seen):
            if is_config(node):
                first = seen.get(id(node), path)
                yield path, Name(target_name(node) if first == path else f"the same as {first}")
            else:
                yield path, Name(node) if node is NOT_SET else node


def override_text(value: Any) -> str:
    """Return the text of VALUE in `--fdl.PATH=VALUE` that sets a value, unquoted where possible."""
    # As bare words, `true` and `false` are rejected.
    if isinstance(value, str) and value not in ("true", "false"):
        with contextlib.suppress(field_types.FieldTypeError):
            if field_types.parse_literal(value) == value:
                return value
    return value_text(value)
