"""The flags of a run as words again, for the commands that a run records and prints."""

from __future__ import annotations

import dataclasses
from typing import Any

from layerkit_runner.config.flag_table import FLAGS, RunOptions

# Whoever writes a command says these himself: where to write, a sweep's own, and those that tell
# the processes of a job apart, which one command cannot be for all of them.
_SAID_ELSEWHERE = frozenset(
    (
        "job_log_dir",
        # An answer to one refusal; a recorded or printed command must not give it again.
        "allow_restart_from_scratch",
        "study",
        "num_trials",
        "study_storage",
        "coordinator_address",
        "num_processes",
        "process_id",
        "multiprocess_gpu",
    )
)


def run_words(options: RunOptions, *, mode: str) -> list[str]:
    """The flags that are not at their defaults and mean something in a mode, as one types them."""
    default = RunOptions()
    taken = {flag.name for flag in FLAGS if mode in flag.modes} - _SAID_ELSEWHERE
    names = [field.name for field in dataclasses.fields(options) if field.name in taken]
    values = {name: getattr(options, name) for name in names}
    return [flag_word(n, value) for n, value in values.items() if value != getattr(default, n)]


def flag_word(name: str, value: Any) -> str:
    """`--name=value`, `--name` or `--noname`, from what the value was read as."""
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no{name}"
    if isinstance(value, tuple):
        return f"--{name}={','.join(map(str, value))}"
    # None is what `off` was read as.
    return f"--{name}={'off' if value is None else value}"
