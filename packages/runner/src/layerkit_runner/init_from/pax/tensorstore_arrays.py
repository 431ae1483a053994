"""Arrays that Paxml saved by TensorStore: one Zarr folder for each, or an OCDBT database.

A name such as `mdl_vars.params.lm.final_ln.scale` becomes `mdl_vars/params/lm/final_ln/scale`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from etils import epath

from layerkit_runner.checkpointing import chunks
from layerkit_runner.checkpointing.errors import DamagedCheckpointError
from layerkit_runner.checkpointing.structure import LeafSpec
from layerkit_runner.init_from.pax.msgpack_file import array_spec

_END = f"/{chunks.METADATA_KEY}"


class TensorStoreArrays:
    """Arrays in Zarr; see `arrays.PaxArrays`.

    Attributes:
      specs: Stored shape and dtype of each array, by name.
    """

    def __init__(self, state: epath.Path, *, is_ocdbt: bool) -> None:
        """Read the shapes and dtypes.

        Args:
          state: Folder of the arrays.
          is_ocdbt: True for an OCDBT database, False for a folder for each array.

        Raises:
          DamagedCheckpointError: The metadata of an array are malformed.
        """
        self._state, self._is_ocdbt = state, is_ocdbt
        self._names: dict[str, str] = {}
        self._open: dict[str, Any] = {}
        specs: dict[str, LeafSpec] = {}
        try:
            self._store = chunks.open_store(state, is_ocdbt=is_ocdbt)
            keys = self._store.list().result()
        except ValueError as error:
            raise _damaged(state, None, error) from error
        for key in sorted(keys):
            stored = key.decode(errors="replace")
            if not stored.endswith(_END) or stored.count("/") != 1:
                continue
            stored = stored.removesuffix(_END)
            name = stored.replace(".", "/")
            try:
                metadata = chunks.read_metadata(self._store, stored)
                specs[name] = array_spec(metadata["shape"], metadata["dtype"])
            except (ValueError, KeyError, TypeError) as error:
                raise _damaged(state, name, error) from error
            self._names[name] = stored
        self.specs: Mapping[str, LeafSpec] = specs

    def check(self, names: Collection[str]) -> None:
        """Check the sizes of the chunks of these arrays.

        Raises:
          DamagedCheckpointError: A chunk would decompress to more than its array holds.
        """
        arrays = {self._names[name]: self.specs[name] for name in names}
        chunks.check_arrays(self._state, arrays, is_ocdbt=self._is_ocdbt)

    def read(self, name: str, ranges: tuple[slice, ...]) -> np.ndarray:
        """Read the chunks of a block of an array.

        Raises:
          DamagedCheckpointError: A chunk is malformed or missing.
        """
        import tensorstore as ts

        try:
            if name not in self._open:
                kvstore = (self._store / f"{self._names[name]}/").spec().to_json()
                self._open[name] = ts.open(
                    {"driver": "zarr", "kvstore": kvstore, "fill_missing_data_reads": False},
                    open=True,
                    read=True,
                ).result()
            return np.asarray(self._open[name][ranges].read().result())
        except ValueError as error:
            raise _damaged(self._state, name, error) from error


def _damaged(state: epath.Path, name: str | None, error: Exception) -> DamagedCheckpointError:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    return DamagedCheckpointError(
        f"cannot be read: {reason.partition(' [source locations=')[0]}",
        owner=str(state),
        field="database" if name is None else "array",
        value=state.name if name is None else name,
        expected="files that Paxml wrote",
        hint="Copy the checkpoint again.",
    )
