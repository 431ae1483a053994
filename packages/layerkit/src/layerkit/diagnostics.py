"""Names of layers in errors, and the warning about a model that may be trained by mistake."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable, Collection
from typing import Any

from layerkit.near_names import near_names

_NOTE = "In layer "
# "Linear(lm/softmax): input_dims=0, …", "Linear(lm/softmax).w: …"
_NAMED = re.compile(r"(\w+\([\w/]*\))[.:]")


def naming_layer(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method of a layer so that errors carry the path of the innermost layer as a note."""

    @functools.wraps(method)
    def named(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            if layer_of(error) is None:
                error.add_note(f"{_NOTE}{self.path_name}")
            raise

    return named


def layer_of(error: BaseException) -> str | None:
    """Return the class and path of the layer in which an error was raised; None if in none."""
    # Checks of layers begin with it, and need no note.
    if named := _NAMED.match(str(error)):
        return named[1]
    for note in getattr(error, "__notes__", ()):
        if note.startswith(_NOTE):
            return str(note.removeprefix(_NOTE))
    return None


def unknown_name(layer: Any, kind: str, name: str, names: Collection[str]) -> AttributeError:
    """Return the error for a weight or variable that a layer does not have.

    Args:
      layer: The layer.
      kind: "weight" or "variable".
      name: The name that was asked for.
      names: Names of the weights or variables that the layer has.
    """
    return AttributeError(
        f"{layer.path_name} has no {kind} {name!r}{near_names(name, names)}"
        f" Its {kind}s: {', '.join(names) or 'none'}.",
        name=name,
        obj=layer,
    )


def warn_of_unset_train(layer: Any, *, collection: str) -> None:
    """Warn if a model whose `train` nobody set is applied as if it were trained.

    Its gradients would be those of evaluation: without dropout, noise and capacities.

    Args:
      layer: The layer that depends on `train`.
      collection: Name of the collection that only training makes mutable.
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
