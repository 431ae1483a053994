"""Layer paths in errors, and the warning about training a model in evaluation mode."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable, Collection
from typing import Any

from layerkit.errors import ConfigError, UnknownNameError, UserError, error_text

_NOTE = "In layer "
# The owner of a UserError, or the start of the text of another error: "Linear(lm/softmax).w: …".
_LAYER = re.compile(r"\w+\([\w/]*\)(?=[.:]|$)")


def naming_layer(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method of a layer so that errors name the innermost layer.

    A `UserError` without owner gets the layer as its owner, any other error gets a note.
    """

    @functools.wraps(method)
    def named(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            if isinstance(error, UserError) and error.owner is None:
                error.owner = self.path_name
            elif layer_of(error) is None:
                error.add_note(f"{_NOTE}{self.path_name}")
            raise

    return named


def layer_of(error: BaseException) -> str | None:
    """Return the class and path of the layer that raised an error, or None if no layer did."""
    text = error.owner or "" if isinstance(error, UserError) else error_text(error)
    if named := _LAYER.match(text):
        return named[0]
    for note in getattr(error, "__notes__", ()):
        if note.startswith(_NOTE):
            return str(note.removeprefix(_NOTE))
    return None


def unknown_name(layer: Any, kind: str, name: str, names: Collection[str]) -> UnknownNameError:
    """Return the error about a weight or variable that a layer does not have.

    Args:
      layer: Layer, a `BaseLayer`.
      kind: "weight" or "variable".
      name: Requested name.
      names: Names of the weights or variables that the layer has.
    """
    return UnknownNameError(f"unknown {kind}", owner=layer.path_name, value=name, choices=names)


def immutable_error(layer: Any, problem: str, field: str, collection: str) -> ConfigError:
    """Return the error about a value of `field` that an immutable collection would lose."""
    hint = f"Apply with mutable=['{collection}', …]"
    return ConfigError(problem, owner=layer.path_name, field=field, hint=hint)


def warn_of_unset_train(layer: Any, *, collection: str) -> None:
    """Warn if a model with `train=None` is applied as in training.

    Its gradients would be those of evaluation, without dropout, noise and expert capacities.

    Args:
      layer: Layer that depends on `train`.
      collection: Name of a collection that is mutable only in training.
    """
    if layer.inherited("train") is not None or layer.scope is None:
        return
    if not layer.is_mutable_collection(collection) or layer.is_initializing():
        return
    root = layer
    while hasattr(root.parent, "path_name"):
        root = root.parent
    warnings.warn(
        f"{root.path_name}: train=None while {collection!r} is mutable, as it is in training."
        " Dropout and noise are off, as in evaluation. Apply model.clone(train=True) to train, or"
        " model.clone(train=False) to evaluate.",
        stacklevel=3,
    )
