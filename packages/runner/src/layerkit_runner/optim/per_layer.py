"""Declarations of optimizers: whether their update of an entry depends on its whole tensor.

Such a rule, as Adafactor's factors or LAMB's trust ratio, treats each layer of a stack as a tensor
of its own. Any other rule gives the same result for a stack and for its layers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import fiddle as fdl

_BY_ENTRY = (
    *("adabelief", "adadelta", "adagrad", "adam", "adamax", "adamaxw", "adamw", "adan", "amsgrad"),
    *("lion", "nadam", "nadamw", "optimistic_gradient_descent", "radam", "rmsprop", "rprop", "sgd"),
    *("sign_sgd", "signum", "yogi", "scale_by_learning_rate", "acprop", "ademamix"),
    *("schedule_free_adamw", "schedule_free_sgd"),
)
_BY_TENSOR = ("adafactor", "fromage", "lamb", "lars", "novograd", "sm3")
_OPTAX = dict.fromkeys(_BY_ENTRY, False) | dict.fromkeys(_BY_TENSOR, True)
_DECLARED: dict[Any, Callable[..., bool | None]] = {}

Function = TypeVar("Function", bound=Callable[..., Any])


def declare_per_layer(rule: Callable[..., bool | None]) -> Callable[[Function], Function]:
    """Return a decorator of a function that makes an optimizer.

    Args:
      rule: A function of the optimizer's arguments by name. It returns True if the update of an
        entry depends on its whole tensor, and None if that is unknown.
    """

    def declare(function: Function) -> Function:
        _DECLARED[function] = rule
        return function

    return declare


def per_layer_of(optimizer: Any) -> bool | None:
    """Return what an optimizer declares; None if it declares nothing.

    Args:
      optimizer: A function that makes an optimizer, a `Partial` of one, or what it was built to.
    """
    arguments: Mapping[str, Any] = {}
    if isinstance(optimizer, functools.partial):
        arguments = optimizer.keywords
        # A built `Partial` is the argument of a function.
        optimizer = optimizer.args[0] if optimizer.args else optimizer.func
    if isinstance(optimizer, fdl.Partial):
        optimizer, arguments = fdl.get_callable(optimizer), optimizer.__arguments__
    if getattr(optimizer, "__module__", "").startswith("optax.") and callable(optimizer):
        return _OPTAX.get(optimizer.__name__)
    rule = _DECLARED.get(optimizer)
    return None if rule is None else rule(**arguments)


def as_inner(*, optimizer: Any, **_: Any) -> bool | None:
    """Return what the wrapped optimizer declares."""
    return per_layer_of(optimizer)
