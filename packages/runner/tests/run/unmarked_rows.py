"""An experiment that decodes rows which neither the data nor the model number or mark."""

from __future__ import annotations

import gated_experiment
import numpy as np

from layerkit.config import Config
from layerkit.config.nested_map import NestedMap
from layerkit_inputs.base.base_input import BaseInput


class Doubling(gated_experiment.Line):
    """Decodes twice the first number of each row."""

    def decode(self, batch: NestedMap) -> NestedMap:
        return NestedMap(twice=2 * batch.x[:, 0])


class Counting(BaseInput):
    """Rows 1 to 5 of host 0, and 101 to 103 of host 1, in batches of one number."""

    def _reset(self) -> None:
        self._num_read = 0

    def _next(self) -> NestedMap:
        self._num_read = getattr(self, "_num_read", 0) + 1
        if self._num_read > (5, 3)[self.infeed_host_index]:
            raise StopIteration
        number = 100 * self.infeed_host_index + self._num_read
        return NestedMap(x=np.full((self.batch_size, 2), number, np.float32))


class UnmarkedRows(gated_experiment.Gated):
    """Two steps, then the decoding."""

    MAX_STEPS = 2

    def task(self) -> Config:
        return super().task().set(model=Doubling.HParams.config())

    def decode_datasets(self) -> list[Config]:
        return [Counting.HParams.config(name="points", percore_batch_size=1.0)]
