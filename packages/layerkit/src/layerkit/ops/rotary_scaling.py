"""Scaling of rotary embeddings for contexts longer than the trained one.

Rotary embeddings rotate pair i of a head by position·frequency_i. Each class is a published method
to change the frequencies, so that positions beyond the trained context give angles that the model
was trained on. Some also multiply the rotated queries and keys by a factor. Use them as
`RotaryPositionalEmbedding(scaling=…)`; they are computed once on the host.

Only `LongRopeScaling` depends on the length of the sequence. Cached keys were rotated when they
were written and do not match queries that are rotated by other frequencies, so decoding computes
the cache anew where a sequence outgrows the trained context.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from layerkit.config.checks import require


@dataclasses.dataclass(frozen=True)
class RotaryScaling:
    """The base class of scaling methods. A field `factor` is at least 1."""

    def __post_init__(self) -> None:
        """Check the fields."""
        factor = getattr(self, "factor", 1.0)
        require(factor >= 1, type(self).__name__, "factor", factor, "a number of 1 or more")

    def frequencies(self, frequencies: np.ndarray) -> np.ndarray:
        """Return the scaled frequencies.

        Args:
          frequencies: float64 `[pairs]`, radians per position, decreasing by a constant ratio.

        Returns:
          float64 `[pairs]`, or `[2, pairs]` for short and for long sequences.
        """
        raise NotImplementedError(f"{type(self).__qualname__} does not define frequencies")

    def magnitude(self) -> float:
        """Return the factor of rotated queries and of rotated keys, 1 in this class."""
        return 1.0


@dataclasses.dataclass(frozen=True)
class LinearScaling(RotaryScaling):
    """Position interpolation: all positions divided by a factor (Chen et al., 2023, 2306.15595).

    Attributes:
      factor: Ratio of the extended to the trained context length; at least 1.
    """

    factor: float

    def frequencies(self, frequencies: np.ndarray) -> np.ndarray:
        """Divide all frequencies `[pairs]` by the factor."""
        return frequencies / self.factor


@dataclasses.dataclass(frozen=True)
class ProportionalScaling(RotaryScaling):
    """Rotation of the fast pairs of a head, and none of the others (Gemma 4).

    The frequencies are those of a whole head, unlike `RotaryPositionalEmbedding.fraction`, which
    spreads all frequencies over the rotated part.

    Attributes:
      fraction: Fraction of the pairs that are rotated.
      factor: Divisor of the frequencies; at least 1.
    """

    fraction: float = 1.0
    factor: float = 1.0

    def frequencies(self, frequencies: np.ndarray) -> np.ndarray:
        """Divide the first frequencies of `[pairs]` by the factor, and set the others to 0."""
        is_rotated = np.arange(len(frequencies)) < int(self.fraction * len(frequencies))
        return np.where(is_rotated, frequencies / self.factor, 0.0)


@dataclasses.dataclass(frozen=True)
class NtkScaling(RotaryScaling):
    """NTK-aware scaling: a larger base, which slows slow pairs by the factor and fast ones hardly.

    With d coordinates the base becomes base·factor^(d/(d-2)). Dynamic NTK scaling is the same with
    factor·length/trained_length - (factor - 1) as factor, for a length that must not change while
    a cache is in use. Source: bloc97, 2023; in Peng et al., 2023, arXiv:2309.00071.

    Attributes:
      factor: Ratio of the extended to the trained context length; at least 1.
    """

    factor: float

    def frequencies(self, frequencies: np.ndarray) -> np.ndarray:
        """Divide frequency i of `[pairs]` by factor^(i/(pairs - 1))."""
        stretch = np.arange(len(frequencies), dtype=np.float64) / (len(frequencies) - 1)
        return frequencies * self.factor**-stretch


@dataclasses.dataclass(frozen=True)
class YarnScaling(RotaryScaling):
    """YaRN: fast pairs unchanged, slow pairs divided by the factor, with a ramp between.

    A pair is fast if it makes at least `beta_fast` turns within the trained context, and slow if it
    makes at most `beta_slow` turns. Source: Peng et al., 2023 (arXiv:2309.00071).

    Attributes:
      factor: Ratio of the extended to the trained context length; at least 1.
      original_max_position: Length of the trained context.
      beta_fast: Number of turns from which a pair is unchanged.
      beta_slow: Number of turns up to which a pair is divided by the whole factor.
      attention_factor: Factor of rotated queries and of rotated keys; None for 0.1·ln(factor) + 1,
        as in the paper.
      mscale: Numerator m of another attention factor (DeepSeek-V2): the ratio of
        0.1·m·ln(factor) + 1 for `mscale` and for `mscale_all_dim`.
      mscale_all_dim: Denominator m of that ratio; set both or neither.
      truncate: True if the ramp starts and ends at whole pairs.
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
        """Check the fields."""
        super().__post_init__()
        expected = f"a number above 0 and at most beta_fast={self.beta_fast}"
        is_valid = 0 < self.beta_slow <= self.beta_fast
        require(is_valid, "YarnScaling", "beta_slow", self.beta_slow, expected)
        is_valid = (self.mscale is None) == (self.mscale_all_dim is None)
        expected = f"a value if and only if mscale_all_dim={self.mscale_all_dim} has one"
        require(is_valid, "YarnScaling", "mscale", self.mscale, expected)
        is_valid = self.mscale is None or self.attention_factor is None
        expected = f"None, since mscale={self.mscale} determines the factor"
        require(is_valid, "YarnScaling", "attention_factor", self.attention_factor, expected)

    def frequencies(self, frequencies: np.ndarray) -> np.ndarray:
        """Divide each frequency of `[pairs]` by 1 to `factor`."""
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
        """Return the attention factor."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale is not None and self.mscale_all_dim is not None:
            return yarn_magnitude(self.factor, self.mscale) / yarn_magnitude(
                self.factor, self.mscale_all_dim
            )
        return yarn_magnitude(self.factor)

    def _pair_of(self, turns: float, frequencies: np.ndarray) -> float:
        """Return the fractional pair index with a number of turns in the trained context."""
        log_base = -math.log(frequencies[-1] / frequencies[0]) / (len(frequencies) - 1)
        frequency = turns * 2.0 * math.pi / self.original_max_position
        return math.log(frequencies[0] / frequency) / log_base


def yarn_magnitude(factor: float, mscale: float = 1.0) -> float:
    """Return 0.1·mscale·ln(factor) + 1, the factor of rotated queries and keys in YaRN."""
    return 0.1 * mscale * math.log(factor) + 1.0


@dataclasses.dataclass(frozen=True)
class Llama3Scaling(RotaryScaling):
    """Scaling of Llama 3.1: low frequencies divided by the factor, high ones unchanged, a ramp.

    Source: Llama team, 2024 (arXiv:2407.21783), and Meta's reference code.

    Attributes:
      factor: Divisor of the lowest frequencies; at least 1.
      low_freq_factor: Number of waves in the trained context below which frequencies are divided by
        the whole factor.
      high_freq_factor: Number of waves in the trained context above which frequencies are
        unchanged.
      original_max_position: Length of the trained context.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int

    def __post_init__(self) -> None:
        """Check the fields."""
        super().__post_init__()
        expected = f"a number above 0 and at most high_freq_factor={self.high_freq_factor}"
        is_valid = 0 < self.low_freq_factor <= self.high_freq_factor
        require(is_valid, "Llama3Scaling", "low_freq_factor", self.low_freq_factor, expected)

    def frequencies(self, frequencies: np.ndarray) -> np.ndarray:
        """Divide each frequency of `[pairs]` by 1 to `factor`."""
        waves_in_context = self.original_max_position * frequencies / (2.0 * math.pi)
        # Equal factors are a step instead of a ramp.
        width = max(self.high_freq_factor - self.low_freq_factor, 1e-9)
        ramp = (waves_in_context - self.low_freq_factor) / width
        kept = np.clip(ramp, 0.0, 1.0)
        return kept * frequencies + (1.0 - kept) * frequencies / self.factor


@dataclasses.dataclass(frozen=True)
class LongRopeScaling(RotaryScaling):
    """LongRoPE: a factor for each pair, found by search, separately for short and long sequences.

    Source: Ding et al., 2024 (LongRoPE, arXiv:2402.13753), as in Phi 3.

    Attributes:
      short_factors: Factor of each pair, for sequences up to original_max_position.
      long_factors: Factor of each pair, for longer sequences.
      original_max_position: Length of the trained context.
      max_position: Length of the extended context.
      longest_sequence: Length that selects the factors of all sequences; None for the length of
        each row, as in published code.
      attention_factor: Factor of rotated queries and of rotated keys; None for
        √(1 + ln(max_position/original_max_position)/ln(original_max_position)), or 1 if
        max_position is below original_max_position.
    """

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_max_position: int
    max_position: int
    longest_sequence: int | None = None
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        """Check the fields."""
        # Files have lists, but values of a config must be hashable.
        for field in ("short_factors", "long_factors"):
            factors = tuple(getattr(self, field))
            object.__setattr__(self, field, factors)

    def frequencies(self, frequencies: np.ndarray) -> np.ndarray:
        """Divide frequency i of `[pairs]` by factor i; `[2, pairs]` without `longest_sequence`."""
        for field in ("short_factors", "long_factors"):
            size, pairs = len(getattr(self, field)), len(frequencies)
            expected = f"{pairs}, one factor for each rotated pair"
            require(size == pairs, "LongRopeScaling", f"length of {field}", size, expected)
        both = frequencies / np.asarray([self.short_factors, self.long_factors], np.float64)
        if self.longest_sequence is None:
            return both
        return both[int(self.longest_sequence > self.original_max_position)]

    def magnitude(self) -> float:
        """Return the attention factor."""
        if self.attention_factor is not None:
            return self.attention_factor
        longer = max(1.0, self.max_position / self.original_max_position)
        return math.sqrt(1.0 + math.log(longer) / math.log(self.original_max_position))
