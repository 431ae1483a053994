"""SpokenDigits, an input of strings of digits that a small formant synthesizer speaks.

A digit is a sequence of phones. Voiced phones are harmonics of a pitch, whose amplitudes follow two
resonances (formants) that glide from phone to phone, and others are noise around a frequency. Each
row has a speaker of its own: pitch, rate, length of the vocal tract, and loudness of the noise.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from layerkit_inputs import SpeechInput
from layerkit_inputs.synthetic.generated_rows import GeneratedRows

# Phones: first and second formant in Hz, amplitudes of voice and of noise, frequency of the noise.
# Formants of vowels are those of men in Peterson and Barney (1952).
_PHONES: dict[str, tuple[float, float, float, float, float]] = {
    "iy": (270, 2290, 1, 0, 2500),
    "ih": (390, 1990, 1, 0, 2500),
    "eh": (530, 1840, 1, 0, 2500),
    "ah": (640, 1190, 1, 0, 2500),
    "aa": (730, 1090, 1, 0, 2500),
    "ao": (570, 840, 1, 0, 2500),
    "uw": (300, 870, 1, 0, 2500),
    "ow": (450, 900, 1, 0, 2500),
    "r": (490, 1350, 0.8, 0, 2500),
    "w": (300, 610, 0.7, 0, 2500),
    "n": (280, 1400, 0.5, 0, 2500),
    "v": (280, 1100, 0.5, 0.1, 2000),
    "z": (280, 1700, 0.4, 0.3, 3500),
    "s": (280, 1700, 0, 0.5, 3500),
    "f": (280, 1100, 0, 0.2, 2000),
    "th": (280, 1400, 0, 0.15, 2500),
    "t": (280, 1700, 0, 0.4, 3000),
    "-": (280, 1400, 0, 0, 2500),
}
_DIGITS = (
    ("z", "iy", "r", "ow"),
    ("w", "ah", "n"),
    ("-", "t", "uw"),
    ("th", "r", "iy"),
    ("f", "ao", "r"),
    ("f", "aa", "iy", "v"),
    ("s", "ih", "-", "s"),
    ("s", "eh", "v", "eh", "n"),
    ("eh", "iy", "-", "t"),
    ("n", "aa", "iy", "n"),
)


class SpokenDigits(GeneratedRows, SpeechInput):
    """An input of spoken digits, with transcripts such as "3 0 7"; see `SpeechInput`."""

    sample_rate: int = 8000
    max_samples: int = 22_000
    max_labels: int = 9
    min_digits: int = 3
    """Smallest number of digits of a row."""
    max_digits: int = 5
    """Largest number of digits of a row."""

    def _utterances(self, rows: np.ndarray) -> list[tuple[np.ndarray, str]]:
        made = []
        for draw in self._generators(rows):
            digits = draw.integers(10, size=draw.integers(self.min_digits, self.max_digits + 1))
            sound = speak(digits.tolist(), draw, sample_rate=self.sample_rate)
            made.append((sound[: self.max_samples], " ".join(map(str, digits))))
        return made

    def _fingerprint(self) -> dict[str, Any]:
        fields = ("sample_rate", "max_samples", "min_digits", "max_digits", "is_training")
        return {**{name: getattr(self, name) for name in fields}, "seed": self._seed}


def speak(digits: list[int], draw: np.random.Generator, *, sample_rate: int) -> np.ndarray:
    """Return samples float32 `[samples]` in [-1, 1] of digits, by a random speaker.

    A digit takes at most 0.55 seconds.
    """
    pitch, rate = draw.uniform(90, 220), draw.uniform(0.85, 1.25)
    tract, noise = draw.uniform(0.9, 1.15), 10 ** draw.uniform(-2.5, -1.5)
    pieces = []
    for digit in digits:
        phones = np.array([_PHONES[name] for name in ("-", *_DIGITS[digit], "-")])
        seconds = draw.uniform(0.045, 0.08, len(phones)) / rate
        seconds[[0, -1]] = draw.uniform(0.01, 0.04, 2)
        # Values at the middle of each phone, between which they glide.
        middles = np.cumsum(seconds) - seconds / 2
        time = np.arange(int(seconds.sum() * sample_rate)) / sample_rate
        first, second, voice, hiss, center = (np.interp(time, middles, x) for x in phones.T)
        melody = pitch * (
            1 + 0.1 * np.sin(2 * np.pi * draw.uniform(1, 3) * time + draw.uniform(0, 6))
        )
        phase = 2 * np.pi * np.cumsum(melody) / sample_rate
        numbers = np.arange(1, int(sample_rate / 2 / melody.max()), dtype=np.float32)[:, None]
        # Amplitudes change every 5 ms.
        step = sample_rate // 200
        hertz = numbers * melody[::step]
        tones = sum(
            loud / (1 + ((hertz - tract * formant[::step]) / width) ** 2)
            for formant, loud, width in ((first, 1.0, 90.0), (second, 0.5, 130.0))
        )
        waves = np.sin(numbers * (phase.astype(np.float32) + 1))
        buzz = np.einsum(
            "hs,hs->s", tones.astype(np.float32).repeat(step, 1)[:, : len(time)], waves
        )
        carrier = np.sin(2 * np.pi * np.cumsum(tract * center) / sample_rate)
        breath = carrier * np.convolve(draw.standard_normal(len(time)), np.ones(6) / 6**0.5, "same")
        pieces.append(voice * buzz + hiss * breath)
    sound = np.concatenate(pieces)
    sound = 0.3 * sound / np.sqrt(np.mean(sound**2) + 1e-9)
    sound += noise * draw.standard_normal(len(sound))
    return np.clip(sound * draw.uniform(0.3, 1.0), -1, 1).astype(np.float32)
