"""`SomeClass.HParams`: the fields of a class, as in Praxis, and the base of configurable classes.

A class declares its fields by annotations, or, as in Praxis, by a nested class
`HParams(BaseHParams)`. Both become dataclass fields and `SomeClass.HParams.config(…)`, whose fields
type checkers read from the signature of the class: mypy by a property of the metaclass, and pyright
by a descriptor, over which a nested class `HParams` takes precedence.

A layer declares by `used_only_if` the condition on its other fields under which a field has an
effect:

    class Projection(BaseLayer):
        used_only_if: ClassVar[Conditions] = {"bias_tpl": "use_bias"}

`check_fields` raises for a field that is set although its condition is not met, since setting it
changes nothing. `derive_fields` raises for a field of a template that contradicts its owner.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Generic, ParamSpec, TypeVar, dataclass_transform

from layerkit.config.config import Config, Partial, assigned_fields, is_config, target_of, was_built
from layerkit.config.field_types import convert_field, field_annotations
from layerkit.errors import ConfigError, UnknownFieldError, short_repr

MYPY = False  # True to mypy alone

if TYPE_CHECKING:
    P = ParamSpec("P")
    T = TypeVar("T")

    class HParamsOf(Generic[P, T]):
        """The `HParams` of a class as type checkers see it."""

        def config(self, *args: P.args, **fields: P.kwargs) -> Config[T]:
            """Return an editable config of the class."""

        def partial(self, *args: Any, **fields: Any) -> Partial[T]:
            """Return a config of a call that takes further arguments."""

    class HParamsDescriptor:
        """The attribute `HParams` of a class as pyright sees it."""

        def __get__(self, instance: None, owner: Callable[P, T]) -> HParamsOf[P, T]:
            """Return the `HParams` of a class."""

    if MYPY:

        class TypedHParams(type):
            """The metaclass of classes with `HParams` as mypy sees it."""

            @property
            def HParams(cls: Callable[P, T]) -> HParamsOf[P, T]:  # noqa: N802
                """The `HParams` of a class."""

    else:

        class TypedHParams(type):
            """The metaclass of classes with `HParams` as pyright sees it."""

else:
    TypedHParams = type


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
      UnknownFieldError: A nested `HParams` assigns an undeclared name.
    """
    nested = cls.__dict__.get("HParams")
    bases = [base.HParams for base in cls.__bases__ if hasattr(base, "HParams")] or [BaseHParams]
    annotations, inherited = dict(inspect.get_annotations(cls)), _inherited_types(cls)
    if nested is not None:
        # Fields of base classes are inherited; moving them again would undo later defaults.
        done = {source for base in bases for source in base.__mro__}
        for source in reversed(nested.__mro__):
            if source not in done and source.__dict__.get("_target", nested) is nested:
                annotations |= _move_nested_fields(cls, source, inherited)
        bases = [nested, *(base for base in bases if not issubclass(nested, base))]
    kept = {name: inherited[name] for name in vars(cls) if name in inherited}
    cls.__annotations__ = kept | annotations
    attributes = {
        "__module__": cls.__module__,
        "__qualname__": f"{cls.__qualname__}.HParams",
        "__doc__": nested.__doc__ if nested is not None else f"Fields of {cls.__qualname__}.",
        "_target": cls,
    }
    cls.HParams = type("HParams", tuple(bases), attributes)  # type: ignore[attr-defined]


def _inherited_types(cls: type) -> dict[str, Any]:
    """Return the types of the fields of the base classes."""
    bases = [base for base in reversed(cls.__mro__[1:]) if dataclasses.is_dataclass(base)]
    return {field.name: field.type for base in bases for field in dataclasses.fields(base)}


def _move_nested_fields(cls: type, nested: type, inherited: dict[str, Any]) -> dict[str, Any]:
    """Set the values of a nested class on `cls`, and return the annotations of its fields."""
    annotations = dict(inspect.get_annotations(nested))
    for name, value in vars(nested).items():
        if name.startswith("_"):
            continue
        if name not in annotations and name in inherited:
            annotations[name] = inherited[name]
        if name in annotations:
            setattr(cls, name, value)
        elif not callable(value) and not hasattr(value, "__get__"):
            raise UnknownFieldError(
                "unknown field",
                owner=f"{cls.__qualname__}.HParams",
                value=name,
                choices=[*annotations, *inherited],
                hint="A new field needs an annotation.",
            )
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


# Field, or path into its template → field that must be set (other than None, False and 0), or
# "not " and a field that must not be set; or several of these, which must all hold; or "never" for
# an inherited field that a subclass does not use.
Conditions = Mapping[str, str | tuple[str, ...]]

_NEGATION, _NEVER = "not ", "never"


def check_fields(layer: Any, *, owner: str) -> None:
    """Check the fields of a layer.

    Their types are checked only if the layer was made without a config, which checks them.

    Args:
      layer: An instance of a dataclass, with or without `used_only_if`.
      owner: Name of the layer for messages.

    Raises:
      FieldTypeError: A value does not have the type of its field.
      ConfigError: A float field holds NaN or infinity, or a field is set although another one
        switches it off.
    """
    cls: Any = type(layer)
    is_converted = was_built(layer)
    for name, annotation in field_annotations(cls).items():
        value = getattr(layer, name)
        if not is_converted:
            convert_field(cls, name, value, owner=owner)
        # NaN would pass every comparison, and show only as losses that are NaN.
        is_number = isinstance(value, float) and "float" in annotation
        if is_number and not math.isfinite(value):
            raise ConfigError(owner=owner, field=name, value=value, expected="a finite number")
    for path, condition in unmet_conditions(layer):
        for changed, value in _changes(layer, path):
            switch = condition.removeprefix(_NEGATION)
            if condition == _NEVER:
                where, other = f"in {cls.__qualname__}", ""
            else:
                where, other = f"while {_state(layer, switch)}", f", or change {switch}"
            raise ConfigError(
                owner=owner,
                field=changed,
                value=value,
                expected=f"the default, since it has no effect {where}",
                hint=f"Leave {changed} out{other}.",
            )


def checking_fields(setup: Callable[[Any], None]) -> Callable[[Any], None]:
    """Wrap the `setup` of a layer, where its path is known first, so that it checks the fields."""

    @functools.wraps(setup)
    def checked(self: Any) -> None:
        check_fields(self, owner=self.path_name)
        setup(self)

    return checked


def unmet_conditions(layer: Any) -> Iterator[tuple[str, str]]:
    """Yield (field or path, condition) of what has no effect in a layer, or in its config."""
    cls: Any = target_of(layer) if is_config(layer) else type(layer)
    for path, conditions in conditions_of(cls).items():
        for condition in (conditions,) if isinstance(conditions, str) else conditions:
            field = condition.removeprefix(_NEGATION)
            is_set = field != _NEVER and bool(getattr(layer, field))
            if is_set == condition.startswith(_NEGATION):
                yield path, condition
                break


@functools.cache
def conditions_of(cls: Any) -> Conditions:
    """Return the conditions of a class and of its base classes."""
    conditions: dict[str, str | tuple[str, ...]] = {}
    for base in reversed(inspect.getmro(cls)) if isinstance(cls, type) else ():
        conditions |= vars(base).get("used_only_if", {})
    return conditions


# Cached, since every trace of every layer needs it.
@functools.cache
def _defaults(cls: Any) -> Config:
    return Config(cls)


def _changes(layer: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield (path, value) of what differs from the default at or below a path."""
    parent, _, name = path.rpartition(".")
    owner = functools.reduce(getattr, parent.split("."), layer) if parent else layer
    if parent and (not is_config(owner) or not hasattr(target_of(owner), "__dataclass_fields__")):
        return
    cls: Any = target_of(owner) if is_config(owner) else type(owner)
    if name in cls.__dataclass_fields__:
        yield from _differences(getattr(owner, name), getattr(_defaults(cls), name), path)


def _differences(value: Any, default: Any, path: str) -> Iterator[tuple[str, Any]]:
    both = is_config(value) and is_config(default)
    if not both or target_of(value) is not target_of(default):
        if value != default:
            yield path, value
        return
    # Field by field, since `==` of configs takes ten times as long.
    here, there = assigned_fields(value), assigned_fields(default)
    for name in here | there:
        if isinstance(name, str):
            one = here[name] if name in here else getattr(value, name)
            other = there[name] if name in there else getattr(default, name)
            yield from _differences(one, other, f"{path}.{name}")


def _state(layer: Any, field: str) -> str:
    value = getattr(layer, field)
    is_plain = value is None or isinstance(value, (bool, int, float, str))
    return f"{field}={short_repr(value)}" if is_plain else f"{field} is set"


def derive_fields(template: Config, where: str, **derived: Any) -> Config:
    """Return a copy of a template with the fields that its owner derives.

    Args:
      template: Config of the layer.
      where: Path of the template, for error messages.
      **derived: Derived values by field; None leaves a field unchanged.

    Raises:
      ConfigError: The template sets a field to another value, even to the field's default.
    """
    config = template.clone()
    defaults = assigned_fields(_defaults(target_of(config)))
    for name, value in derived.items():
        if value is None:
            continue
        explicit = assigned_fields(config).get(name)
        is_set = explicit is not None and explicit != defaults.get(name)
        if is_set and explicit != value:
            raise ConfigError(
                owner=where,
                field=name,
                value=explicit,
                expected=f"{value!r}, which the owner derives",
                hint="Leave the field out.",
            )
        setattr(config, name, value)
    return config
