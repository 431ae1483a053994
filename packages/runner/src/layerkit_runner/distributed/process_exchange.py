"""Exchange of small JSON values between the processes of one job.

All processes must call `gather_values` and `from_process_0` in the same order. A single process
sends nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

_SMALLEST_MESSAGE = 256
_SECONDS_TO_ARRIVE = 30


def distributed_state() -> Any:
    """Return JAX's record of this process's connection; its `client` is a store that all share."""
    from jax._src import distributed

    return distributed.global_state


def all_arrive(name: str) -> bool:
    """Return whether all processes of the job call this with the same name within 30 seconds.

    The barrier uses no device, so others may wait in a collective meanwhile.
    """
    client = distributed_state().client
    if client is None:
        return True
    try:
        client.wait_at_barrier(f"layerkit_runner/{name}", _SECONDS_TO_ARRIVE * 1000)
    except jax.errors.JaxRuntimeError:
        return False
    return True


def gather_values(value: Any) -> list[Any]:
    """Return the JSON values of all processes, in the order of their numbers."""
    if jax.process_count() == 1:
        return [value]
    message = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.int32(message.size))
    # Powers of two, since each new size is compiled.
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
      Exception: The error of `make` on this process.
      ValueError: The text of an error on another process.
    """
    value, error = None, None
    try:
        value = make()
    except BaseException as problem:  # raised below, since the other processes wait for this one
        error = problem
    answers = gather_values([value, error and f"{type(error).__name__}: {error}"])
    if error is not None:
        raise error
    for process, (_, text) in enumerate(answers):
        if text is not None:
            raise ValueError(f"process {process}: {text}")
    return [each for each, _ in answers]


def from_process_0(make: Callable[[], Any]) -> Any:
    """Call a function on process 0 and return its JSON value, or raise its error, on all."""
    return from_each_process(lambda: make() if jax.process_index() == 0 else None)[0]
