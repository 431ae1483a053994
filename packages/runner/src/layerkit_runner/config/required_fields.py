"""Configs whose fields are partly filled in by the job, such as those of programs."""

from __future__ import annotations

import inspect
from collections.abc import Collection

from layerkit.config import Config, assigned_fields, target_of
from layerkit_runner.errors import UsageError, first_names


def check_filled_in(config: Config, path: str, *, by_job: Collection[str]) -> None:
    """Whether an experiment sets those fields of a config that are its own, and no others.

    Args:
      config: Of a class.
      path: Where it stands, for messages.
      by_job: The fields that the job fills in.

    Raises:
      UsageError: a field is set that the job fills in, or one without a default is not set.
    """
    kind, assigned = target_of(config), assigned_fields(config)
    if taken := [name for name in assigned if name in by_job]:
        raise UsageError(f"{path}.{taken[0]} is filled in by the job and cannot be set")
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    parameters = [p for p in inspect.signature(kind).parameters.values() if p.kind not in kinds]
    needed = [p.name for p in parameters if p.default is p.empty and p.name not in by_job]
    if missing := [name for name in needed if name not in assigned]:
        raise UsageError(f"{path}: {kind.__qualname__} needs a value for {first_names(missing)}")
