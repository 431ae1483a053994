"""Configuration: editable descriptions of layers, tasks, learners and inputs.

A `Config` is an editable description of a call: Fiddle's `Config`, which also checks the names and
the types of fields. `build` creates the object. A config in a field of another one has one of two
roles:

* A **template** (`sub_config_field`) stays a config. The layer that owns the field creates children
  from it, each with its own weights.
* Any other config is **built** with its parent, once per config object: the same object in two
  fields becomes one shared object.

A class declares its fields by annotations, or, as in Praxis, by a nested class
`HParams(BaseHParams)`. Both become dataclass fields and `Class.HParams.config(…)`.

This module imports neither JAX nor Flax, so that command lines and data workers can use it.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, TypeVar, dataclass_transform

import fiddle as fdl

from layerkit.config.field_types import (
    FieldTypeError,
    convert_field,
    field_choices,
    parameters_of,
    typed_fields,
)
from layerkit.config.graphs import copy_config as copy_config
from layerkit.config.graphs import equal_configs, map_containers
from layerkit.config.graphs import walk_configs as walk_configs
from layerkit.config.html_display import ConfigDisplay
from layerkit.config.typed_hparams import MYPY, TypedHParams
from layerkit.errors import UnknownFieldError as UnknownFieldError

if TYPE_CHECKING:
    from layerkit.config.typed_hparams import HParamsDescriptor

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

_ROLE = "layerkit.role"
_MAKE = "layerkit.make_default"
_TEMPLATE = "template"
_FROZEN = "__frozen__"


def field_names(target: Any) -> list[str]:
    """Return the names that a config of `target`, a class or function, may set."""
    if isinstance(target, fdl.Buildable):
        target = fdl.get_callable(target)
    return list(typed_fields(target))


def _accepts_any_keyword(target: Any) -> bool:
    kinds = {parameter.kind for parameter in parameters_of(target)}
    return not dataclasses.is_dataclass(target) and inspect.Parameter.VAR_KEYWORD in kinds


def _check_keyword(target: Any, name: str) -> None:
    if name not in typed_fields(target) and not _accepts_any_keyword(target):
        owner = getattr(target, "__qualname__", repr(target))
        choices, hint = field_choices(target), dataclass_hint(target, name)
        raise UnknownFieldError(
            "unknown field", owner=owner, value=name, choices=choices, hint=hint
        )


def dataclass_hint(target: Any, name: str) -> str | None:
    """Return the hint about a class whose annotated `name` is no field; None for other names."""
    bases = inspect.getmro(target) if isinstance(target, type) else ()
    if dataclasses.is_dataclass(target) or not any(
        name in inspect.get_annotations(base) for base in bases
    ):
        return None
    return f"Write @dataclasses.dataclass above class {target.__qualname__}."


# Cached because Fiddle evaluates all annotations of a target to find its tags.
@functools.cache
def _empty_config(kind: Any, target: Any) -> fdl.Buildable:
    """Return a config without arguments, to be copied."""
    config = object.__new__(kind)
    fdl.Buildable.__init__(config, target)
    return config


class _Editable(ConfigDisplay, Generic[T_co]):
    """Base of `Config` and `Partial`, which checks names and types and copies defaults."""

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
            if _MAKE in field.metadata:
                self._set_default(field.name, field.metadata[_MAKE]())
            elif field.default_factory is not dataclasses.MISSING:
                self._set_default(field.name, field.default_factory())

    def _set_default(self, name: str, value: Any) -> None:
        super()._arguments_set_value(name, value)  # type: ignore[misc]

    def _arguments_set_value(self, key: int | str, value: Any) -> None:
        """Set an argument, which Fiddle does by this method alone, converted to its type."""
        if isinstance(key, str):
            value = convert_field(self.__fn_or_cls__, key, value)
        super()._arguments_set_value(key, value)  # type: ignore[misc]

    def _refuse_if_frozen(self, field: Any) -> None:
        if self.__dict__.get(_FROZEN):
            label = getattr(self.__fn_or_cls__, "__qualname__", repr(self.__fn_or_cls__))
            raise dataclasses.FrozenInstanceError(
                f"{label}.{field} cannot be changed: this config belongs to a built object;"
                " use clone() to edit a copy, and build from that"
            )

    def __delattr__(self, name: str) -> None:
        self._refuse_if_frozen(name)
        super().__delattr__(name)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._refuse_if_frozen(key)
        super().__setitem__(key, value)  # type: ignore[misc]

    def __delitem__(self, key: Any) -> None:
        self._refuse_if_frozen(key)
        super().__delitem__(key)  # type: ignore[misc]

    def __setattr__(self, name: str, value: Any) -> None:
        self._refuse_if_frozen(name)
        if not name.startswith("__"):
            _check_keyword(self.__fn_or_cls__, name)
        super().__setattr__(name, value)

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

    def __copy__(self) -> Self:
        """Return a shallow copy that can be edited."""
        fields = {name: value for name, value in self.__dict__.items() if name != _FROZEN}
        fields["__arguments__"] = dict(self.__arguments__)
        for name in ("__argument_tags__", "__argument_history__"):
            entries = fields[name] = copy.copy(fields[name])
            entries.update({key: copy.copy(entry) for key, entry in entries.items()})
        copied = object.__new__(type(self))
        copied.__dict__.update(fields)
        return copied

    def set(self, **fields: Any) -> Self:
        """Set several fields, or none if one of them is wrong, and return this config."""
        for name, value in fields.items():
            _check_keyword(self.__fn_or_cls__, name)
            convert_field(self.__fn_or_cls__, name, value)
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


def target_of(config: fdl.Buildable) -> Any:
    """Return the class or function that `config` describes a call of."""
    return fdl.get_callable(config)


def is_config(value: Any) -> bool:
    """Return True for a `Config` or `Partial`, also a plain one of Fiddle."""
    return isinstance(value, fdl.Buildable)


def assigned_fields(config: fdl.Buildable) -> dict[str, Any]:
    """Return the fields of `config` that were assigned, and its sub-configs.

    The key of a positional argument without a name is its index.
    """
    return dict(config.__arguments__)


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
        _check_keyword(root.__fn_or_cls__, name)
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

            def call(*args: Any, **more: Any) -> Any:
                first, named = _split_positional(node, node.__arguments__)
                return build(Config(target, *first, *args, **{**named, **more}))

            return call
        templates = _template_fields(target)
        arguments = {
            name: _freeze(item) if name in templates else visit(item)
            for name, item in node.__arguments__.items()
        }
        _check_required(target, arguments)
        positional, named = _split_positional(node, arguments)
        return node.__build__(*positional, **named)

    return visit(root)


def _check_required(target: Any, arguments: dict[str, Any]) -> None:
    if not dataclasses.is_dataclass(target):
        return
    missing = [
        f.name
        for f in dataclasses.fields(target)
        if f.init
        and f.name not in arguments
        and f.default is dataclasses.MISSING
        and f.default_factory is dataclasses.MISSING
    ]
    if missing:
        label = getattr(target, "__qualname__", target)
        raise FieldTypeError("missing value", owner=str(label), field=", ".join(missing))


def _default_config(hparams: Any, overrides: dict[str, Any]) -> Config | None:
    if hparams is None:
        return None
    # Configs of one class must not share a default.
    overrides = {n: value.clone() if is_config(value) else value for n, value in overrides.items()}
    if isinstance(hparams, type) and issubclass(hparams, BaseHParams):
        return hparams.config(**overrides)
    return Config(hparams, **overrides)


def sub_config_field(hparams: Any, **overrides: Any) -> Any:
    """Declare a field that holds a *template*: a config that `build` leaves unchanged.

    Args:
      hparams: `SomeLayer.HParams`, or the class, whose config is the default; None for the default
        None.
      **overrides: Fields of the default.
    """

    def make() -> Config | None:
        return _default_config(hparams, overrides)

    return dataclasses.field(
        default_factory=lambda: _freeze(make()), metadata={_ROLE: _TEMPLATE, _MAKE: make}
    )


def instance_field(hparams: Any, **overrides: Any) -> Any:
    """Declare a field whose config is *built* together with its owner.

    Args:
      hparams: `SomeClass.HParams`, or the class, whose config is the default; or None.
      **overrides: Fields of the default.
    """

    def make() -> Config | None:
        return _default_config(hparams, overrides)

    def make_built() -> Any:
        config = make()
        return None if config is None else build(config)

    return dataclasses.field(default_factory=make_built, metadata={_ROLE: "instance", _MAKE: make})


class BaseHParams:
    """Base of the nested `HParams` classes; its annotations become fields of the outer class."""

    _target: ClassVar[Any] = None

    @classmethod
    def config(cls, **fields: Any) -> Config[Any]:
        """Return an editable config of the class that this `HParams` belongs to."""
        return Config(cls._target, **fields)

    @classmethod
    def partial(cls, **fields: Any) -> Partial[Any]:
        """Return a config of a call that takes further arguments."""
        return Partial(cls._target, **fields)


def adopt_hparams(cls: type) -> None:
    """Add `HParams` to `cls` and turn the annotations of a nested one into fields of `cls`.

    Call it before the class becomes a dataclass. An assignment without an annotation changes the
    default of an inherited field, which plain dataclasses would ignore.

    Raises:
      TypeError: A nested `HParams` assigns an undeclared name.
    """
    own_annotations = dict(inspect.get_annotations(cls))
    inherited: dict[str, Any] = {}
    for base in reversed(cls.__mro__[1:]):
        for field in dataclasses.fields(base) if dataclasses.is_dataclass(base) else ():
            inherited[field.name] = field.type
    nested = cls.__dict__.get("HParams")
    base_hparams = [b.HParams for b in cls.__bases__ if hasattr(b, "HParams")] or [BaseHParams]
    if nested is not None:
        # Fields of base classes are inherited; moving them again would undo later defaults.
        done = {source for base in base_hparams for source in base.__mro__}
        for source in reversed(nested.__mro__):
            if source in done or source.__dict__.get("_target", nested) is not nested:
                continue
            own_annotations |= _move_nested_fields(cls, source, inherited)
        bases = (nested, *(b for b in base_hparams if not issubclass(nested, b)))
    else:
        bases = tuple(base_hparams)
    for name in cls.__dict__:
        if name in inherited and name not in own_annotations:
            own_annotations[name] = inherited[name]
    cls.__annotations__ = own_annotations
    cls.HParams = type(  # type: ignore[attr-defined]
        "HParams",
        bases,
        {
            "__module__": cls.__module__,
            "__qualname__": f"{cls.__qualname__}.HParams",
            "__doc__": nested.__doc__ if nested is not None else f"Fields of {cls.__qualname__}.",
            "_target": cls,
        },
    )


def _move_nested_fields(cls: type, nested: type, inherited: dict[str, Any]) -> dict[str, Any]:
    annotations = dict(inspect.get_annotations(nested))
    for name, value in list(nested.__dict__.items()):
        if name.startswith("_"):
            continue
        if name not in annotations and name in inherited:
            annotations[name] = inherited[name]
        if name not in annotations and not callable(value) and not hasattr(value, "__get__"):
            raise UnknownFieldError(
                "unknown field",
                owner=f"{cls.__qualname__}.HParams",
                value=name,
                choices=[*annotations, *inherited],
                hint="A new field needs an annotation.",
            )
        if name in annotations:
            setattr(cls, name, value)
    return annotations


# A call of `sub_config_field` is a plain default to type checkers, or they would require the field.
@dataclass_transform(kw_only_default=True, field_specifiers=(dataclasses.field,))
class Configurable(metaclass=TypedHParams):
    """Base of configurable classes other than layers: tasks, learners, inputs and schedules.

    A subclass becomes a keyword-only dataclass of its annotated fields and gets `HParams`.
    """

    if not TYPE_CHECKING:
        HParams: ClassVar[type[BaseHParams]] = BaseHParams
    elif not MYPY:
        HParams: ClassVar = HParamsDescriptor()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Turn the subclass into a dataclass with `HParams`."""
        super().__init_subclass__(**kwargs)
        adopt_hparams(cls)
        # Objects with state are equal only if they are identical; a subclass may define `__eq__`.
        dataclasses.dataclass(kw_only=True, eq=False, repr=False)(cls)

    def __repr__(self) -> str:
        """Return the class with the values of its fields."""
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        inner = ", ".join(f"{f.name}={getattr(self, f.name, None)!r}" for f in fields if f.init)
        return f"{type(self).__qualname__}({inner})"
