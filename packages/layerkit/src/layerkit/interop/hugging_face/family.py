"""A family of models: what its config.json and its tensors are called, and what they mean here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from layerkit.config import Config
from layerkit.interop.hugging_face.keys import ConfigFile, Entry
from layerkit.interop.hugging_face.tensors import Row
from layerkit.models.language_model import LanguageModel


@dataclasses.dataclass(frozen=True)
class Family:
    """One `model_type` of Hugging Face.

    Attributes:
      model_type: As in config.json.
      architecture: Class of Transformers that the tensors are named for.
      skeleton: Makes the config of the network, with all that the family has in common. It looks at
        the file for what decides the templates, such as the pattern of layers.
      entries: What the keys of config.json mean; read in this order.
      rows: Where the tensors lie in our weights.
      neutral: Keys that do not change the computation, beside those that never do.
      prefix: With which the names of all rows begin, and which some folders leave out.
      copies: Tensors that a folder may hold although they only repeat another: copy → original.
      buffers: Regular expression of the names of tensors that are no weights.
      model_class: What the network is put into, to be trained and decoded with.
      network_field: Of the model, which holds the network.
    """

    model_type: str
    architecture: str
    skeleton: Callable[[ConfigFile], Config]
    entries: tuple[Entry, ...]
    rows: tuple[Row, ...]
    neutral: frozenset[str] = frozenset()
    prefix: str = ""
    copies: Mapping[str, str] = dataclasses.field(default_factory=dict)
    buffers: str = "(?!)"
    model_class: Any = LanguageModel
    network_field: str = "lm_tpl"

    def read_config(self, content: Mapping[str, Any]) -> Config:
        """The model that the content of a config.json describes.

        Raises:
          UnsupportedModelError: an option that we do not have, or do not know.
        """
        file = ConfigFile(content, neutral=self.neutral)
        network = self.skeleton(file)
        for entry in self.entries:
            entry.read(file, network)
        file.refuse_unread()
        return self.model_class.HParams.config(**{self.network_field: network})

    def write_config(self, model: Config) -> dict[str, Any]:
        """The content of a config.json that describes a model of ours.

        Raises:
          UnsupportedModelError, AttributeError: the model is put together in another way.
        """
        network = getattr(model, self.network_field)
        content: dict[str, Any] = {
            "model_type": self.model_type,
            "architectures": [self.architecture],
        }
        for entry in self.entries:
            content |= entry.write(network)
        return content
