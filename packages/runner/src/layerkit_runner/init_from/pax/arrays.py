"""The arrays of a step of Paxml by name, in whichever format it was saved."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

import numpy as np
from etils import epath

from layerkit_runner.checkpointing.structure import LeafSpec
from layerkit_runner.init_from.pax import folders
from layerkit_runner.init_from.pax.msgpack_arrays import MsgpackArrays
from layerkit_runner.init_from.pax.tensorstore_arrays import TensorStoreArrays


class PaxArrays(Protocol):
    """Arrays by name, such as `mdl_vars/params/lm/final_ln/scale`."""

    @property
    def specs(self) -> Mapping[str, LeafSpec]:
        """Stored shape and dtype of each array."""

    def check(self, names: Collection[str]) -> None:
        """Raise an error if reading one of these arrays would need more memory than it holds."""

    def read(self, name: str, ranges: tuple[slice, ...]) -> np.ndarray:
        """Read a block of an array; `ranges` has a slice with start and stop for each axis."""


def open_arrays(step_folder: epath.Path) -> PaxArrays:
    """Open the arrays of a step; only names, shapes and dtypes are read.

    Raises:
      DamagedCheckpointError: The files are malformed.
    """
    state = folders.state_folder(step_folder)
    if (state / folders.OCDBT_FILE).is_file():
        return TensorStoreArrays(state, is_ocdbt=True)
    if (state / folders.MSGPACK_FILE).is_file():
        return MsgpackArrays(state / folders.MSGPACK_FILE)
    return TensorStoreArrays(state, is_ocdbt=False)
