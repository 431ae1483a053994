"""Numbers that can be looked at before a run, told from those that only a trace or a step knows."""

from __future__ import annotations

from typing import Any

import jax


def concrete_number(value: Any) -> float | None:
    """The value of a number, or of an array of one.

    Returns:
      None for a schedule, a traced array (as under `optax.inject_hyperparams`) and what is no
      number at all.
    """
    if isinstance(value, (jax.core.Tracer, str)):
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None
