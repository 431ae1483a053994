"""Rotary positions for longer contexts than a model was trained on.

Rotary embeddings turn pair i of a head by position·frequency_i. Each class here is one published
way of changing the frequencies so that positions beyond the trained ones become angles that the
model knows; some also strengthen the logits, by a factor on the turned queries and keys. They are
values for `RotaryPositionalEmbedding(scaling=…)`, computed once on the host.

None of them looks at how long a sequence is while it runs: the keys of a cache were turned when
they were written, and would not fit queries turned otherwise later.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Protocol

import numpy as np


class RotaryScaling(Protocol):
    """What a way of scaling has to say."""

    def frequencies(self, frequencies: np.ndarray) -> np.ndarray:
        """The scaled frequencies.

        Args:
          frequencies: float64 `[pairs]`, radians per position, falling by one ratio from pair to
            pair.

        Returns:
          float64 `[pairs]`.
        """
        ...

    def magnitude(self) -> float:
        """What the turned queries and keys are multiplied by, each."""
        ...


@dataclasses.dataclass(frozen=True)
class LinearScaling:
    """All positions divided by a factor (position interpolation; Chen et al., 2023, 2306.15595).

    Attributes:
      factor: How many times longer the context becomes; at least 1.
    """

    factor: float

    def __post_init__(self) -> None:
        _check_factor(self)

    def frequencies(self, frequencies: np.ndarray) -> np.ndarray:
        """`[pairs]` → `[pairs]`: all divided by the factor."""
        return frequencies / self.factor

    def magnitude(self) -> float:
        """1."""
        return 1.0


@dataclasses.dataclass(frozen=True)
class NtkScaling:
    """A larger base, so that slow pairs are stretched by the factor and fast ones hardly.

    With d coordinates the base becomes base·factor^(d/(d-2)). What is called dynamic NTK scaling is
    this, with factor·length/trained_length - (factor - 1) for the factor, at a length that must not
    change while a cache is in use. Source: bloc97, 2023; in Peng et al., 2023, arXiv:2309.00071.

    Attributes:
      factor: How many times longer the context becomes; at least 1.
    """

    factor: float

    def __post_init__(self) -> None:
        _check_factor(self)

    def frequencies(self, frequencies: np.ndarray) -> np.ndarray:
        """`[pairs]` → `[pairs]`: pair i divided by factor^(i/(pairs - 1))."""
        _check_pairs(self, frequencies)
        stretch = np.arange(len(frequencies), dtype=np.float64) / (len(frequencies) - 1)
        return frequencies * self.factor**-stretch

    def magnitude(self) -> float:
        """1."""
        return 1.0


@dataclasses.dataclass(frozen=True)
class YarnScaling:
    """Fast pairs are left alone, slow ones divided by the factor, with a ramp between.

    A pair is fast when it makes `beta_fast` turns or more within the trained context, and slow at
    `beta_slow` turns or fewer. Source: Peng et al., 2023 (YaRN, arXiv:2309.00071).

    Attributes:
      factor: How many times longer the context becomes; at least 1.
      original_max_position: Length of the trained context.
      beta_fast: Turns of a pair that is left alone.
      beta_slow: Turns of a pair that is divided by the whole factor.
      attention_factor: Of turned queries and keys, each; None for 0.1·ln(factor) + 1, the paper's.
      mscale: With `mscale_all_dim`, the attention factor is instead the ratio of
        0.1·m·ln(factor) + 1 for the one and the other m (DeepSeek-V2).
      mscale_all_dim: See `mscale`; set both or neither.
      truncate: Whether the ramp begins and ends at whole pairs.
    """

    factor: float
    original_max_position: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        _check_factor(self)
        _check_length(self, self.original_max_position)
        if not 0 < self.beta_slow < self.beta_fast:
            raise ValueError(
                f"YarnScaling: beta_slow={self.beta_slow} and beta_fast={self.beta_fast} must be"
                " 0 < beta_slow < beta_fast"
            )
        _check_attention_factor(self, self.attention_factor)
        if (self.mscale is None) != (self.mscale_all_dim is None):
            raise ValueError(
                f"YarnScaling: mscale={self.mscale} and mscale_all_dim={self.mscale_all_dim} make"
                " one ratio; set both or neither"
            )
        if self.mscale is not None and self.attention_factor is not None:
            raise ValueError(
                f"YarnScaling: attention_factor={self.attention_factor} contradicts"
                f" mscale={self.mscale}, from which it would be derived; set one of them"
            )

    def frequencies(self, frequencies: np.ndarray) -> np.ndarray:
        """`[pairs]` → `[pairs]`: each divided by 1 up to `factor`."""
        _check_pairs(self, frequencies)
        first = self._pair_of(self.beta_fast, frequencies)
        last = self._pair_of(self.beta_slow, frequencies)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, 2 * len(frequencies) - 1)
        if first == last:
            last += 0.001  # a step instead of a ramp
        ramp = np.clip((np.arange(len(frequencies)) - first) / (last - first), 0.0, 1.0)
        return frequencies * (1.0 - ramp) + frequencies / self.factor * ramp

    def magnitude(self) -> float:
        """The attention factor."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale is not None and self.mscale_all_dim is not None:
            return yarn_magnitude(self.factor, self.mscale) / yarn_magnitude(
                self.factor, self.mscale_all_dim
            )
        return yarn_magnitude(self.factor)

    def _pair_of(self, turns: float, frequencies: np.ndarray) -> float:
        """The pair, as a fraction, that makes so many turns within the trained context."""
        log_base = -math.log(frequencies[-1] / frequencies[0]) / (len(frequencies) - 1)
        frequency = turns * 2.0 * math.pi / self.original_max_position
        return math.log(frequencies[0] / frequency) / log_base


def yarn_magnitude(factor: float, mscale: float = 1.0) -> float:
    """0.1·mscale·ln(factor) + 1, by which YaRN strengthens turned queries and keys."""
    return 0.1 * mscale * math.log(factor) + 1.0


@dataclasses.dataclass(frozen=True)
class Llama3Scaling:
    """As in Llama 3.1: long waves divided by the factor, short ones left alone, a ramp between.

    Source: Llama team, 2024 (arXiv:2407.21783), and Meta's reference code.

    Attributes:
      factor: Of the longest waves; at least 1.
      low_freq_factor: Waves longer than original_max_position / low_freq_factor are divided by
        the whole factor.
      high_freq_factor: Waves shorter than original_max_position / high_freq_factor are left alone.
      original_max_position: Length of the trained context.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int

    def __post_init__(self) -> None:
        _check_factor(self)
        _check_length(self, self.original_max_position)
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"Llama3Scaling: low_freq_factor={self.low_freq_factor} and"
                f" high_freq_factor={self.high_freq_factor} must be"
                " 0 < low_freq_factor < high_freq_factor"
            )

    def frequencies(self, frequencies: np.ndarray) -> np.ndarray:
        """`[pairs]` → `[pairs]`: each divided by 1 up to `factor`."""
        waves_in_context = self.original_max_position * frequencies / (2.0 * math.pi)
        ramp = (waves_in_context - self.low_freq_factor) / (
            self.high_freq_factor - self.low_freq_factor
        )
        kept = np.clip(ramp, 0.0, 1.0)
        return kept * frequencies + (1.0 - kept) * frequencies / self.factor

    def magnitude(self) -> float:
        """1."""
        return 1.0


@dataclasses.dataclass(frozen=True)
class LongRopeScaling:
    """A factor for each pair, found by search, with one list for short and one for long use.

    Source: Ding et al., 2024 (LongRoPE, arXiv:2402.13753), as in Phi 3.

    Attributes:
      short_factors: One number per pair, for sequences up to original_max_position.
      long_factors: One number per pair, for longer ones.
      original_max_position: Length of the trained context.
      max_position: Length of the extended context.
      longest_sequence: The longest that will be run, which chooses the list; None for max_position.
        Published code chooses anew for every call, so that a cache breaks where a sequence crosses
        the border.
      attention_factor: Of turned queries and keys, each; None for
        √(1 + ln(max_position/original_max_position)/ln(original_max_position)).
    """

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_max_position: int
    max_position: int
    longest_sequence: int | None = None
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        _check_length(self, self.original_max_position)
        _check_attention_factor(self, self.attention_factor)
        # Lists come from files; a value in a config has to have a hash.
        for field in ("short_factors", "long_factors"):
            factors = tuple(getattr(self, field))
            object.__setattr__(self, field, factors)
            if any(factor <= 0 for factor in factors):
                raise ValueError(f"LongRopeScaling: {field}={factors} must all be positive")
        if self.max_position < self.original_max_position:
            raise ValueError(
                f"LongRopeScaling: max_position={self.max_position} must be at least"
                f" original_max_position={self.original_max_position}"
            )

    def frequencies(self, frequencies: np.ndarray) -> np.ndarray:
        """`[pairs]` → `[pairs]`: pair i divided by factor i."""
        longest = self.max_position if self.longest_sequence is None else self.longest_sequence
        is_long = longest > self.original_max_position
        factors = self.long_factors if is_long else self.short_factors
        if len(factors) != len(frequencies):
            field = "long_factors" if is_long else "short_factors"
            raise ValueError(
                f"LongRopeScaling: {field} holds {len(factors)} numbers, expected"
                f" {len(frequencies)}, one for each pair that is turned"
            )
        return frequencies / np.asarray(factors, np.float64)

    def magnitude(self) -> float:
        """The attention factor."""
        if self.attention_factor is not None:
            return self.attention_factor
        longer = self.max_position / self.original_max_position
        return math.sqrt(1.0 + math.log(longer) / math.log(self.original_max_position))


def _check_factor(scaling: LinearScaling | NtkScaling | YarnScaling | Llama3Scaling) -> None:
    if scaling.factor < 1:
        raise ValueError(
            f"{type(scaling).__name__}: factor={scaling.factor} must be at least 1, how many times"
            " longer the context becomes"
        )


def _check_pairs(scaling: RotaryScaling, frequencies: np.ndarray) -> None:
    if len(frequencies) < 2:
        raise ValueError(
            f"{type(scaling).__name__} changes the ratio between frequencies: expected at least 2"
            f" pairs of coordinates to turn, got {len(frequencies)}"
        )


def _check_length(scaling: RotaryScaling, length: int) -> None:
    if length < 2:
        raise ValueError(
            f"{type(scaling).__name__}: original_max_position={length}, expected the length of the"
            " trained context, at least 2"
        )


def _check_attention_factor(scaling: RotaryScaling, factor: float | None) -> None:
    if factor is not None and factor <= 0:
        raise ValueError(
            f"{type(scaling).__name__}: attention_factor={factor} must be positive, or None"
        )
