"""Plans of changed experiments, compiled one after another within limits."""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Callable

import jax

from layerkit_runner.config.resolve import ResolvedExperiment
from layerkit_runner.errors import UsageError
from layerkit_runner.tools.plan.plan import Plan

_REASON_LENGTH = 200


@dataclasses.dataclass(frozen=True)
class Limits:
    """How much may be compiled.

    Attributes:
      compilations: At most so many.
      seconds: After so long none is begun.
    """

    compilations: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class Trial:
    """What became of one.

    Attributes:
      plan: None where there is none.
      reason: Why there is none.
    """

    plan: Plan | None
    reason: str | None = None


class Trials:
    """Makes plans, counts them, and keeps each.

    Attributes:
      limits: Of all together.
      compiled: How many were begun.
    """

    def __init__(
        self,
        make: Callable[[ResolvedExperiment], Plan],
        limits: Limits,
        *,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Args:
        make: Plans an experiment on the devices that all of them are for.
        limits: Of all together.
        clock: Of the seconds.
        """
        self.limits = limits
        self.compiled = 0
        self._make = make
        self._clock = clock
        self._begun = clock()

    @property
    def seconds(self) -> float:
        """How long they have taken."""
        return self._clock() - self._begun

    @property
    def reached(self) -> str | None:
        """Which limit has been reached, for people; None where there is time left."""
        if self.compiled >= self.limits.compilations:
            return f"{self.limits.compilations} compilations (--max_compilations)"
        if self.seconds >= self.limits.seconds:
            return f"{self.limits.seconds:g} s (--max_seconds)"
        return None

    def run(self, resolved: ResolvedExperiment) -> Trial:
        """Plans an experiment; what is refused, or what the compiler fails at, is told."""
        self.compiled += 1
        try:
            return Trial(self._make(resolved))
        except (UsageError, ValueError, TypeError, NotImplementedError) as error:
            return Trial(None, _reason(error))
        except jax.errors.JaxRuntimeError as error:
            return Trial(None, f"the compiler: {_reason(error)}")
        finally:
            # What JAX keeps of programs that will never run again adds up to gigabytes.
            jax.clear_caches()
            gc.collect()


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= _REASON_LENGTH else text[: _REASON_LENGTH - 1] + "…"
