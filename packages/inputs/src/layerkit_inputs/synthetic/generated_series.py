"""GeneratedSeries, an input of windows of series that are generated on demand."""

from __future__ import annotations

from typing import Any

import numpy as np

from layerkit.config.checks import check_non_negative
from layerkit.config.nested_map import NestedMap
from layerkit_inputs.arrays.csv_series import SeriesInput, series_batch
from layerkit_inputs.synthetic.generated_rows import GeneratedRows


class GeneratedSeries(GeneratedRows, SeriesInput):
    """Windows of series that are generated on demand: two seasons, a trend and noise.

    Each row has periods, phases, amplitudes, slope, offset and scale of its own.
    """

    noise: float = 0.1
    """Standard deviation of the noise, relative to the first season."""

    def __post_init__(self) -> None:
        """Check the fields."""
        super().__post_init__()
        check_non_negative(self._label, noise=self.noise)

    def _read_rows(self, rows: np.ndarray) -> NestedMap:
        time = np.arange(self.window_length)
        values = np.empty((len(rows), self.window_length))
        for place, draw in enumerate(self._generators(rows)):
            uniform, noise = draw.random(8), draw.standard_normal(self.window_length)
            seasons = [
                amplitude * np.sin(2 * np.pi * (time / period + phase))
                for amplitude, period, phase in (
                    (1.0, 8 * 8 ** uniform[0], uniform[1]),
                    (uniform[2], 32 * 8 ** uniform[3], uniform[4]),
                )
            ]
            trend = 2 * (uniform[5] - 0.5) * time / self.window_length
            shape = seasons[0] + seasons[1] + trend + self.noise * noise
            values[place] = 10 ** (2 * uniform[6]) * (shape + 10 * (uniform[7] - 0.5))
        return series_batch(values, self.frequency)

    def _fingerprint(self) -> dict[str, Any]:
        fields = ("window_length", "noise", "is_training")
        return {**{name: getattr(self, name) for name in fields}, "seed": self._seed}
