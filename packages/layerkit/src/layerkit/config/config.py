"""Configuration: editable descriptions of layers, tasks, learners and inputs.

A `Config` is an editable description of a call: Fiddle's `Config`, which also checks the names and
the types of fields. `build` creates the object. A config in a field of another one has one of two
roles:

* A **template** (`sub_config_field`) stays a config. The layer that owns the field creates children
  from it, each with its own weights.
* Any other config is **built** with its parent, once per config object: the same object in two
  fields becomes one shared object.

This module imports neither JAX nor Flax, so that command lines and data workers can use it.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, Generic, Self, TypeVar

import fiddle as fdl

from layerkit.config.field_types import (
    FieldTypeError,
    convert_field,
    field_annotations,
    field_choices,
    is_config,
    parameters_of,
)
from layerkit.errors import UnknownFieldError

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

_ROLE = "layerkit.role"
_MAKE = "layerkit.make_default"
_TEMPLATE = "template"
_FROZEN = "__frozen__"
_BUILT = "_layerkit_built"
_MISSING = object()


def _accepts_any_keyword(target: Any) -> bool:
    kinds = {parameter.kind for parameter in parameters_of(target)}
    return not dataclasses.is_dataclass(target) and inspect.Parameter.VAR_KEYWORD in kinds


def _check_keyword(target: Any, name: str) -> None:
    if name not in field_annotations(target) and not _accepts_any_keyword(target):
        owner = getattr(target, "__qualname__", repr(target))
        choices = field_choices(target)
        raise UnknownFieldError("unknown field", owner=owner, value=name, choices=choices)


# Cached because Fiddle evaluates all annotations of a target to find its tags.
@functools.cache
def _empty_config(kind: Any, target: Any) -> fdl.Buildable:
    """Return a config without arguments, to be copied."""
    config = object.__new__(kind)
    fdl.Buildable.__init__(config, target)
    return config


class ShownAsTree:
    """A value that a notebook shows as a foldable tree, by treescope."""

    def _ipython_display_(self) -> None:
        import treescope

        treescope.show(self)

    def _render_tree(self, name: Any, fields: dict[str, Any], *context: Any) -> Any:
        """Return what `__treescope_repr__(*context)` returns for a call `name(**fields)`."""
        from treescope import repr_lib

        return repr_lib.render_object_constructor(name, fields, *context, roundtrippable=False)


class _Editable(ShownAsTree, Generic[T_co]):
    """Base of `Config` and `Partial`, which checks names and types and copies defaults.

    Fiddle sets and deletes arguments by two methods, `_arguments_set_value` and
    `_arguments_del_value`. The history of edits that Fiddle would record there is not kept.
    """

    __fn_or_cls__: Any
    __arguments__: dict[Any, Any]

    def __init__(self, target: Callable[..., T_co], /, *args: Any, **fields: Any):
        for name in fields:
            _check_keyword(target, name)
        kind: Any = type(self)
        self.__dict__.update(copy.copy(_empty_config(kind, target)).__dict__)
        bind = self.__signature_info__.signature_binding
        for key, value in bind(target, *args, **fields).items():
            self._arguments_set_value(key, value)
        self._fill_default_factories()

    def _fill_default_factories(self) -> None:
        """Create sub-configs and containers that belong to this config and can be edited."""
        if not dataclasses.is_dataclass(self.__fn_or_cls__):
            return
        for field in dataclasses.fields(self.__fn_or_cls__):
            if not field.init or field.name in self.__arguments__:
                continue
            make = field.metadata.get(_MAKE, field.default_factory)
            if make is not dataclasses.MISSING:
                self.__arguments__[field.name] = make()

    def _arguments_set_value(self, key: int | str, value: Any) -> None:
        self._check_editable(key)
        if isinstance(key, str):
            value = convert_field(self.__fn_or_cls__, key, value)
        self.__arguments__[key] = value

    def _arguments_del_value(self, key: int | str) -> None:
        self._check_editable(key)
        del self.__arguments__[key]

    def _check_editable(self, field: int | str) -> None:
        if _FROZEN in self.__dict__:
            label = getattr(self.__fn_or_cls__, "__qualname__", repr(self.__fn_or_cls__))
            raise dataclasses.FrozenInstanceError(
                f"{label}.{field} cannot be changed: this config belongs to a built object;"
                " use clone() to edit a copy, and build from that"
            )

    def __setattr__(self, name: str, value: Any) -> None:
        _check_keyword(self.__fn_or_cls__, name)
        self._arguments_set_value(name, value)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__"):
            _check_keyword(self.__fn_or_cls__, name)
        return super().__getattr__(name)  # type: ignore[misc]

    # A module whose fields hold configs is a key of JAX's caches. The hash depends on the target
    # alone, which no edit changes. Configs in a built module are frozen, since an edit would leave
    # a stale program in a cache.
    def __hash__(self) -> int:
        return hash(self.__fn_or_cls__)

    def __eq__(self, other: object) -> bool:
        return equal_configs(self, other)

    def __treescope_repr__(self, *context: Any) -> Any:
        """Return the call and its assigned fields for treescope."""
        fields = {str(k): v for k, v in self.__arguments__.items()}
        return self._render_tree(self.__fn_or_cls__, fields, *context)

    def __copy__(self) -> Self:
        """Return a shallow copy that can be edited."""
        copied = object.__new__(type(self))
        copied.__dict__.update(self.__dict__, __arguments__=dict(self.__arguments__))
        copied.__dict__.pop(_FROZEN, None)
        return copied

    def set(self, **fields: Any) -> Self:
        """Set several fields, and return this config."""
        for name, value in fields.items():
            setattr(self, name, value)
        return self

    def clone(self, **fields: Any) -> Self:
        """Return an independent copy with `fields` set.

        The config of a built object is frozen; edit a clone of it.
        """
        return copy_config(self).set(**fields)

    def with_class(self, target: Callable[..., Any], /, **fields: Any) -> Self:
        """Return a config of another class that keeps the fields which were set on this one.

        Args:
          target: The class or function.
          **fields: Fields to set or to replace.

        Raises:
          UnknownFieldError: `target` lacks a field that was set; `del config.field` unsets it.
          FieldTypeError: A value is of another type than in `target`.
        """
        return type(self)(target, **copy_config(changed_fields(self) | fields))


def changed_fields(config: fdl.Buildable) -> dict[str, Any]:
    """Return the named fields of `config` whose values are not the defaults of its class."""
    default = type(config)(target_of(config)).__arguments__
    return {
        name: value
        for name, value in config.__arguments__.items()
        if isinstance(name, str) and not (name in default and default[name] == value)
    }


class Config(_Editable[T_co], fdl.Config[T_co]):
    """An editable description of the call `target(**fields)`.

    An unknown field raises `UnknownFieldError`, and a value of another type `FieldTypeError`, when
    it is assigned.
    """

    def Instantiate(self, **overrides: Any) -> T_co:  # noqa: N802 - the name Pax's users know
        """Build the described object with `overrides`, which do not change this config."""
        return build(self, **overrides)


class Partial(_Editable[T_co], fdl.Partial[T_co]):
    """A description of a call with some arguments left to the caller.

    `build` returns a function. Each call of that function builds nested configs again, so they are
    not shared between calls.
    """

    def Instantiate(self, **overrides: Any) -> Callable[..., T_co]:  # noqa: N802
        """Return the function `(**more) -> target(**fields, **more)`."""
        return build(self, **overrides)


def _freeze(template: T) -> T:
    """Freeze the configs in a value that a built object holds."""
    for config in walk_configs(template):
        if isinstance(config, _Editable):
            object.__setattr__(config, _FROZEN, True)
    return template


def _split_positional(
    node: fdl.Buildable, arguments: dict[Any, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Return the positional and the named arguments of a call."""
    return node.__signature_info__.transform_to_args_kwargs(arguments)


def _template_fields(target: Any) -> frozenset[str]:
    if not dataclasses.is_dataclass(target):
        return frozenset()
    fields = dataclasses.fields(target)
    return frozenset(f.name for f in fields if f.metadata.get(_ROLE) == _TEMPLATE)


def build(config: fdl.Buildable, /, **overrides: Any) -> Any:
    """Build the object that `config` describes.

    Args:
      config: Description of the object, which later edits of the config do not affect.
      **overrides: Fields that replace those of `config`.

    Returns:
      The built object; for a `Partial`, a function that builds at each call. Templates in the
      object are frozen: they can be read and cloned.

    Raises:
      TypeError: `config` is not a config, or a required field has no value.
    """
    if not isinstance(config, fdl.Buildable):
        raise FieldTypeError(owner="build()", value=config, expected="a Config or a Partial")
    root = copy_config(config)
    for name, value in overrides.items():
        setattr(root, name, value)
    built: dict[int, Any] = {}

    def visit(value: Any) -> Any:
        if not isinstance(value, fdl.Buildable):
            return map_containers(value, visit)
        if id(value) not in built:
            built[id(value)] = make(value)
        return built[id(value)]

    def make(node: fdl.Buildable) -> Any:
        target = fdl.get_callable(node)
        if isinstance(node, fdl.Partial):
            # Its readers find the `Partial` in `args`.
            return functools.partial(_build_partial, node)
        templates = _template_fields(target)
        arguments = {
            name: _freeze(item) if name in templates else visit(item)
            for name, item in node.__arguments__.items()
        }
        if missing := _missing_fields(target, arguments):
            owner = target.__qualname__
            raise FieldTypeError("missing value", owner=owner, field=", ".join(missing))
        positional, named = _split_positional(node, arguments)
        result = node.__build__(*positional, **named)
        if isinstance(node, _Editable) and dataclasses.is_dataclass(target):
            vars(result)[_BUILT] = True
        return result

    return visit(root)


def was_built(instance: Any) -> bool:
    """Return whether `build` made an object from a `Config`, which checked the types of fields."""
    return _BUILT in vars(instance)


def _build_partial(node: fdl.Partial, *args: Any, **more: Any) -> Any:
    positional, named = _split_positional(node, node.__arguments__)
    return build(Config(fdl.get_callable(node), *positional, *args, **{**named, **more}))


def _missing_fields(target: Any, arguments: dict[str, Any]) -> list[str]:
    """Return the names of the fields without a value and without a default."""
    fields = dataclasses.fields(target) if dataclasses.is_dataclass(target) else ()
    return [
        f.name
        for f in fields
        if f.init
        and f.name not in arguments
        and f.default is dataclasses.MISSING
        and f.default_factory is dataclasses.MISSING
    ]


def _declare(
    role: str, hparams: Any, overrides: dict[str, Any], convert: Callable[[Config], Any]
) -> Any:
    """Return a field whose default is a new config of a class, converted in a built object."""

    def make() -> Config | None:
        # Configs of one class must not share a default.
        target = getattr(hparams, "_target", hparams)
        return None if hparams is None else Config(target, **copy_config(overrides))

    def make_converted() -> Any:
        config = make()
        return None if config is None else convert(config)

    return dataclasses.field(default_factory=make_converted, metadata={_ROLE: role, _MAKE: make})


def sub_config_field(hparams: Any, **overrides: Any) -> Any:
    """Declare a field that holds a *template*: a config that `build` leaves unchanged.

    Args:
      hparams: `SomeLayer.HParams`, or the class, whose config is the default; None for the default
        None.
      **overrides: Fields of the default.
    """
    return _declare(_TEMPLATE, hparams, overrides, _freeze)


def instance_field(hparams: Any, **overrides: Any) -> Any:
    """Declare a field whose config is *built* together with its owner.

    Args:
      hparams: `SomeClass.HParams`, or the class, whose config is the default; or None.
      **overrides: Fields of the default.
    """
    return _declare("instance", hparams, overrides, build)


def target_of(config: fdl.Buildable) -> Any:
    """Return the class or function that `config` describes a call of."""
    return fdl.get_callable(config)


def assigned_fields(config: fdl.Buildable) -> dict[str, Any]:
    """Return the fields of `config` that were assigned, and its sub-configs.

    The key of a positional argument without a name is its index.
    """
    return dict(config.__arguments__)


def field_names(target: Any) -> list[str]:
    """Return the names that a config of `target`, a class or function, may set."""
    return list(field_annotations(target_of(target) if is_config(target) else target))


def fields_of(template: Any, **values: Any) -> dict[str, Any]:
    """Return the values whose names are fields of a config, for classes that lack some of them."""
    names = field_names(template)
    return {name: value for name, value in values.items() if name in names}


def map_containers(value: Any, visit: Callable[[Any], Any]) -> Any:
    """Apply `visit` to the elements of a list, tuple or dict; return other values unchanged."""
    if isinstance(value, dict):
        copied = copy.copy(value)  # keeps attributes of subclasses, such as a default factory
        copied.update({key: visit(item) for key, item in value.items()})
        return copied
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(visit(item) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(visit(item) for item in value)
    return value


def copy_config(config: T) -> T:
    """Copy a graph of configs and containers; other values are shared with the copy.

    The copies can be edited, even if the originals are frozen.
    """
    copies: dict[int, Any] = {}

    def visit(value: Any) -> Any:
        if not isinstance(value, fdl.Buildable):
            return map_containers(value, visit)
        if id(value) not in copies:
            copied = copies[id(value)] = value.__copy__()
            for name, item in value.__arguments__.items():
                copied.__arguments__[name] = visit(item)
        return copies[id(value)]

    return visit(config)


def walk_configs(value: Any) -> Iterator[fdl.Buildable]:
    """Yield each config in `value`, outer ones first, through fields and containers."""
    if isinstance(value, fdl.Buildable):
        yield value
        value = list(value.__arguments__.values())
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from walk_configs(item)


def equal_configs(left: Any, right: Any) -> bool:
    """Return True if two values describe the same calls, with the same configs shared in each.

    A field that is set to its default equals one that is not set. JAX compares configs whenever it
    looks up a layer in its caches; the time of Fiddle's own comparison doubles with each level of
    nesting.
    """
    rights: dict[int, int] = {}
    lefts: dict[int, int] = {}

    def same(one: Any, other: Any) -> bool:
        if isinstance(one, fdl.Buildable):
            if id(one) in rights or id(other) in lefts:
                return rights.get(id(one)) == id(other) and lefts.get(id(other)) == id(one)
            rights[id(one)], lefts[id(other)] = id(other), id(one)
            has_same_target = type(one) is type(other) and one.__fn_or_cls__ == other.__fn_or_cls__
            return has_same_target and all(
                same(_field(one, key), _field(other, key))
                for key in one.__arguments__.keys() | other.__arguments__.keys()
            )
        if type(one) is type(other) and isinstance(one, (list, tuple)):
            return len(one) == len(other) and all(map(same, one, other))
        if type(one) is type(other) and isinstance(one, dict):
            return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
        return one is other or bool(one == other)

    return left is right or same(left, right)


def _field(config: fdl.Buildable, key: int | str) -> Any:
    if key in config.__arguments__:
        return config.__arguments__[key]
    return config.__signature_info__.get_default(key, _MISSING)
