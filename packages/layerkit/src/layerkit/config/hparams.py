"""`SomeClass.HParams`: the fields of a class, as in Praxis, and the base of configurable classes.

A class declares its fields by annotations, or, as in Praxis, by a nested class
`HParams(BaseHParams)`. Both become dataclass fields and `SomeClass.HParams.config(…)`, whose fields
type checkers read from the signature of the class: mypy by a property of the metaclass, and pyright
by a descriptor, over which a nested class `HParams` takes precedence.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Generic,
    ParamSpec,
    TypeVar,
    dataclass_transform,
)

from layerkit.config.config import Config, Partial
from layerkit.errors import UnknownFieldError

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
