"""What evaluations found at the steps that are saved: one small file beside the checkpoints.

Which checkpoints are the best must be known after a restart too, and an evaluation may come after
its step was saved, so the numbers are not inside the steps, whose files never change.

    DIR/evaluations.json    {"version": 1, "evaluations": {"400": {"heldout/loss": 2.5, …}, …}}
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

from etils import epath

from layerkit_runner.files.atomic_write import atomic_write

FILE_NAME = "evaluations.json"
_VERSION = 1

Evaluations = dict[int, dict[str, float]]
"""Step to metrics, these by `data set/metric`."""


def read(directory: epath.Path) -> Evaluations:
    """Returns what is recorded; empty if nothing is.

    Raises:
      ValueError: the file is not as this package writes it.
    """
    path = directory / FILE_NAME
    if not path.exists():
        return {}
    try:
        document = json.loads(path.read_text())
        if document["version"] > _VERSION:
            raise ValueError(f"version {document['version']}, expected up to {_VERSION}")
        return {
            int(step): {name: float(value) for name, value in metrics.items()}
            for step, metrics in document["evaluations"].items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} cannot be read ({error}); it says which checkpoints are the best. Delete it "
            "to go on without what it says."
        ) from error


def write(directory: epath.Path, evaluations: Mapping[int, Mapping[str, float]]) -> None:
    """Replaces what is recorded, at once; a value that is no number is left out."""
    numbers = {
        str(step): {name: value for name, value in metrics.items() if not math.isnan(value)}
        for step, metrics in sorted(evaluations.items())
    }
    document = {"version": _VERSION, "evaluations": numbers}
    atomic_write(directory / FILE_NAME, json.dumps(document, indent=1) + "\n")
