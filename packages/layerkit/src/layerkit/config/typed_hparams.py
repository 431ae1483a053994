"""The attribute `HParams` as type checkers see it; at run time this module does nothing.

Type checkers read the fields of `SomeClass.HParams.config(…)` from the signature of the class:
mypy by a property of the metaclass, and pyright by a descriptor, over which a nested class
`HParams` takes precedence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar

MYPY = False  # True to mypy alone

if TYPE_CHECKING:
    from layerkit.config.config import Config, Partial

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
