"""A Hugging Face folder, read by the names of the model of ours that its config.json describes."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import jax
from etils import epath

from layerkit.base_layer import PARAMS
from layerkit.config import build
from layerkit.interop.hugging_face import families, folder, importing, tensors
from layerkit_runner.checkpointing.structure import LeafPath, LeafSpec
from layerkit_runner.errors import UsageError


class StoredHuggingFace:
    """The weights of a Hugging Face folder.

    Attributes:
      label: The folder, for messages and records.
      step: None, since there is none.
      leaves: Shape and dtype of every weight by its path, such as `("params", "lm", "w")`.
    """

    step = None

    def __init__(self, directory: epath.Path, *, like: Collection[LeafPath] | None) -> None:
        """Reads config.json and the names of the tensors.

        Args:
          directory: The folder.
          like: Paths of the weights here: its layers are stacked, or one after the other, in the
            way that shares more of them. None: they are stacked.

        Raises:
          UsageError: a model that is not supported, or files that are missing.
        """
        self.label = str(directory)
        self._directory = directory
        try:
            self._family = families.family_of(folder.read_json(directory).get("model_type"))
            self._chosen = self._anatomy(repeated=True)
            if like is not None and not self._chosen.weights.keys() <= set(like):
                unrolled = self._anatomy(repeated=False)
                ways = (self._chosen, unrolled)
                self._chosen = max(ways, key=lambda way: len(way.weights.keys() & set(like)))
            self.leaves: Mapping[LeafPath, LeafSpec] = self._read_names()
        except (OSError, ValueError, ImportError) as error:
            raise UsageError(str(error)) from error

    def read(self, wanted: Mapping[LeafPath, jax.ShapeDtypeStruct]) -> dict[LeafPath, jax.Array]:
        """Some of the weights, each under the sharding that is wanted, slice by slice.

        Args:
          wanted: Shape and dtype from `leaves`, with a sharding.

        Raises:
          UsageError: tensors that are missing, surplus, or of another shape.
        """
        try:
            with folder.SafetensorsFolder(self._directory) as source:
                like = tensors.unflatten(wanted)
                read = importing.read_weights(source, self._family, self._chosen, like=like)
        except (OSError, ValueError) as error:
            raise UsageError(f"{self.label}: {error}") from error
        return tensors.flatten(read)

    def _anatomy(self, *, repeated: bool) -> tensors.Anatomy:
        model = build(importing.model_config(self._directory, repeated=repeated))
        return tensors.dissect(model, self._family.rows)

    def _read_names(self) -> dict[LeafPath, LeafSpec]:
        """Weights are told in the dtypes that they are stored in, not in those of the model."""
        with folder.SafetensorsFolder(self._directory) as source:
            dtypes = importing.stored_dtypes(source, self._family, self._chosen)
        return {
            path: LeafSpec(tuple(weight.shape), dtypes[path])
            for path, weight in self._chosen.weights.items()
            if path[0] == PARAMS and path in dtypes
        }
