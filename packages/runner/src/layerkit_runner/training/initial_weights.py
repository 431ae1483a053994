"""Types of `task.initial_weights`, the source of the weights that a run starts from."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from layerkit.config import Configurable


class InitialWeights(Configurable):
    """Base class of settings that the runner reads itself, such as `InitFrom`."""


@runtime_checkable
class WeightsLoader(Protocol):
    """An object that loads the weights itself."""

    def load(self, model: Any, like: Any) -> Any:
        """Return weights by name; those that it leaves out are drawn at random.

        Args:
          model: Model of the task.
          like: Shapes, dtypes and shardings of its weights, nested dicts by layer path.
        """
