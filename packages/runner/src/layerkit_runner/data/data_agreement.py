"""Do all processes read the same data?

Readers that go by index cut one global order into the rows of each process. Processes whose files
differ (another patch release of Python has other sources, say) would each cut an order of their
own, and their evaluations would end apart and wait for one another.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any

from layerkit_inputs.base_input import BaseInput
from layerkit_inputs.eval_padding import AllGather
from layerkit_runner.data.infeed import told_in_one_line
from layerkit_runner.errors import UsageError


def check_same_data(inputs: Mapping[str, BaseInput], all_gather: AllGather) -> None:
    """Compares where the inputs stand, and in which data, across processes.

    Args:
      inputs: By name; those whose state is not the same on every process are left out.
      all_gather: A JSON value of this process → those of all processes.

    Raises:
      UsageError: on every process, naming the inputs and the processes that differ from process 0;
        or the data cannot be read.
    """
    names = [name for name, dataset in inputs.items() if dataset.state_scope == "global"]
    with told_in_one_line():
        mine = [_digest(inputs[name].get_state()) for name in names]
    digests = all_gather(mine)
    for column, name in enumerate(names):
        others = [
            process
            for process, theirs in enumerate(digests)
            if theirs[column] != digests[0][column]
        ]
        if others:
            raise UsageError(
                f"the data of {name!r} differ between processes: {others} read other data than"
                " process 0. Give every machine the same files (and Python release, where the text"
                " is Python's own)."
            )


def _digest(state: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(state, sort_keys=True).encode())
