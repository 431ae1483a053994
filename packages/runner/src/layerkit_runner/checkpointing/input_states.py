"""Where each process stands in its inputs: one JSON file per process.

An input whose state is global (a sample index, say) can go on with any number of processes. One
that reads its own files in each process cannot, and then restoring says so instead of repeating
or skipping data in silence.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import jax
from etils import epath

_NAME = re.compile(r"process_(\d{5})_of_(\d{5})\.json")


class ProcessCountError(ValueError):
    """The input state was saved by another number of processes and is not a global one."""


def write(directory: epath.Path, text: str) -> None:
    """Writes this process's file; `text` is a JSON object, input name to state."""
    (directory / _name(jax.process_index(), of=jax.process_count())).write_text(text)


def read(directory: epath.Path) -> dict[str, Any]:
    """Returns this process's states by input name.

    If the number of processes has changed, these are process 0's, provided that each says
    `"scope": "global"`.

    Raises:
      ProcessCountError: if it changed and some state does not say so.
    """
    matches = (_NAME.fullmatch(path.name) for path in directory.iterdir())
    stored_count = next(int(match[2]) for match in matches if match)
    if stored_count == jax.process_count():
        return json.loads((directory / _name(jax.process_index(), of=stored_count)).read_text())
    states = json.loads((directory / _name(0, of=stored_count)).read_text())
    _check_global(states, stored_count=stored_count)
    return states


def _name(index: int, *, of: int) -> str:
    return f"process_{index:05d}_of_{of:05d}.json"


def _check_global(states: Mapping[str, Any], *, stored_count: int) -> None:
    bound = [
        name
        for name, state in states.items()
        if not (isinstance(state, Mapping) and state.get("scope") == "global")
    ]
    if bound:
        raise ProcessCountError(
            f"The checkpoint was written by {stored_count} processes and is restored by "
            f"{jax.process_count()}, but the state of these inputs belongs to single processes: "
            f"{', '.join(bound)}. Restore with {stored_count} processes, or use an input whose "
            'state says "scope": "global", such as a global sample index.'
        )
