"""What processes of one job tell one another on the host: small values, as JSON.

Every function here must be called by all processes, in the same order; with a single process
nothing is sent.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

_SMALLEST_MESSAGE = 256


def gather_values(value: Any) -> list[Any]:
    """The JSON values that the processes gave, in the order of their numbers."""
    if jax.process_count() == 1:
        return [value]
    message = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.int32(message.size))
    # Powers of two, since each new size is compiled anew.
    room = _SMALLEST_MESSAGE
    while room < sizes.max():
        room *= 2
    padded = np.zeros(room, np.uint8)
    padded[: message.size] = message
    messages = multihost_utils.process_allgather(padded)
    return [json.loads(row[:size].tobytes()) for row, size in zip(messages, sizes, strict=True)]


def from_each_process(make: Callable[[], Any]) -> list[Any]:
    """Call a function on every process and return the JSON values in the order of the processes.

    Raises:
      Exception: What `make` raised here; a ValueError with its text where another process raised.
    """
    value: Any = None
    error: BaseException | None = None
    try:
        value = make()
    except BaseException as problem:  # the other processes would wait for this one
        error = problem
    answers = gather_values([value, error and f"{type(error).__name__}: {error}"])
    if error is not None:
        raise error
    for process, (_, text) in enumerate(answers):
        if text is not None:
            raise ValueError(f"process {process}: {text}")
    return [each for each, _ in answers]


def from_process_0(make: Callable[[], Any]) -> Any:
    """Call a function on process 0 alone and return its JSON value on every process.

    Raises:
      Exception: What `make` raised; a ValueError with its text on the other processes.
    """
    return from_each_process(lambda: make() if jax.process_index() == 0 else None)[0]
