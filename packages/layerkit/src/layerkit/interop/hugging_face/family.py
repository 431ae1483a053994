"""A family of models: what its config.json and its tensors are called, and what they mean here."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from layerkit.config import Config
from layerkit.interop.hugging_face.keys import ConfigFile, Entry, UnsupportedModelError
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
      counts: Keys of config.json that say how many times tensors are repeated. Those of one tuple
        multiply: the folder holds at least as many tensors as their product.
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
    counts: tuple[tuple[str, ...], ...] = (("num_hidden_layers",),)

    def read_config(self, content: Mapping[str, Any]) -> Config:
        """The model that the content of a config.json describes.

        Raises:
          UnsupportedModelError: an option that we do not have, or do not know, or a value of a
            wrong type.
        """
        file = ConfigFile(content, neutral=self.neutral)
        try:
            network = self.skeleton(file)
            for entry in self.entries:
                entry.read(file, network)
        except (TypeError, AttributeError, KeyError, ArithmeticError) as error:
            raise UnsupportedModelError(
                f"config.json of a {self.model_type} model has a value of a wrong type: {error}"
            ) from error
        file.refuse_unread()
        return self.model_class.HParams.config(**{self.network_field: network})

    def check_counts(self, content: Mapping[str, Any], *, num_tensors: int) -> None:
        """Compare the numbers of layers and experts with a number of tensors.

        A config.json of one line can ask for 10^9 layers, and each is a template to be made.

        Raises:
          UnsupportedModelError: a model of more layers, or more experts in them, than tensors.
        """
        for keys in self.counts:
            values = {key: content[key] for key in keys if content.get(key) is not None}
            for key, value in values.items():
                if not isinstance(value, int) or isinstance(value, bool):
                    raise UnsupportedModelError(
                        f"config.json of a {self.model_type} model: {key}={value!r:.100}. Expected"
                        " an integer."
                    )
            if math.prod(values.values()) > num_tensors:
                declared = ", ".join(f"{key}={value}" for key, value in values.items())
                raise UnsupportedModelError(
                    f"config.json of a {self.model_type} model: {declared}. Expected at most"
                    f" {num_tensors} in all, the number of tensors in the folder."
                )

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
