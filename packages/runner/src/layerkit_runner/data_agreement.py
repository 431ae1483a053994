"""Do all processes read the same data?

Readers that go by index cut one global order into the rows of each process. Processes whose files
differ (another patch release of Python has other sources, say) would each cut an order of their
own, and their evaluations would end apart and wait for one another.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from layerkit_inputs.base_input import BaseInput
from layerkit_runner.errors import UsageError


def check_same_data(
    inputs: Mapping[str, BaseInput], gather: Callable[[np.ndarray], np.ndarray]
) -> None:
    """Compares where the inputs stand, and in which data, across processes.

    Args:
      inputs: By name; those whose state is not the same on every process are left out.
      gather: An array of this process → `[processes, …]` of all, such as
        `multihost_utils.process_allgather`.

    Raises:
      UsageError: on every process, naming the inputs and the processes that differ from process 0.
    """
    names = [name for name, dataset in inputs.items() if dataset.state_scope == "global"]
    digests = gather(np.array([_digest(inputs[name].get_state()) for name in names], np.uint32))
    for column, name in enumerate(names):
        others = np.flatnonzero(digests[:, column] != digests[0, column])
        if others.size:
            raise UsageError(
                f"the data of {name!r} differ between processes: {others.tolist()} read other data"
                " than process 0. Give every machine the same files (and Python release, where the"
                " text is Python's own)."
            )


def _digest(state: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(state, sort_keys=True).encode())
