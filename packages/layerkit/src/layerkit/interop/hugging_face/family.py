"""Families of models: tables of their config.json keys and tensor names."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any

from layerkit.config import Config
from layerkit.config.checks import require
from layerkit.errors import ConfigError
from layerkit.interop.hugging_face.keys import ConfigFile, Entry, UnsupportedModelError, all_layers
from layerkit.interop.hugging_face.tensors import EXPERT, Row, replace_rows
from layerkit.models.language_model import LanguageModel


@dataclasses.dataclass(frozen=True)
class Family:
    """A family of models, one `model_type` of Hugging Face.

    Attributes:
      model_type: `model_type` in config.json.
      architecture: Class of Transformers whose tensor names are used.
      network: Function that returns the config of the network with the family's templates.
      entries: Table from keys of config.json to fields, read in this order.
      rows: Table from tensors to weights.
      fused_rows: Rows that replace those of the same weights in folders that have their tensors,
        such as tensors of all experts.
      neutral: Keys that do not change the computation, in addition to `keys.NEUTRAL`.
      prefix: Prefix of all tensor names, which some folders leave out.
      copies: Tensors that a folder may contain although they repeat another: copy → original.
      stand_ins: Tensors that a folder may lack, although config.json says nothing of it: tensor →
        the one that Transformers then takes.
      other_names: Other names of tensors in some folders: regular expression → replacement.
      buffers: Regular expression of the names of tensors that are not weights.
      unread: Ends of names of tensors that a folder may have in a layer that reads none of them.
      zeros: Regular expression of the names of tensors that are supported if they are 0.
      model_class: Model class that contains the network.
      network_field: Field of the model that holds the network.
      model_entries: Table from keys of config.json to fields of the model itself.
      token_ids: Special tokens of Transformers if the keys are left out, where they may be beyond a
        small vocabulary.
      counts: Keys of config.json with the numbers of layers, such as `text_config.num_layers`, or
        with lists of the types of layers.
      extra_layers: Keys of config.json with the number of layers behind the others, which a folder
        may lack.
      text_of: For a model of text and images, of which the text alone is read: `model_type` of the
        family that export writes instead.
    """

    model_type: str
    architecture: str
    network: Callable[[], Config]
    entries: tuple[Entry, ...]
    rows: tuple[Row, ...]
    fused_rows: tuple[Row, ...] = ()
    neutral: frozenset[str] = frozenset()
    prefix: str = ""
    copies: Mapping[str, str] = dataclasses.field(default_factory=dict)
    stand_ins: Mapping[str, str] = dataclasses.field(default_factory=dict)
    other_names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    buffers: str = "(?!)"
    unread: tuple[str, ...] = ()
    zeros: str = "(?!)"
    model_class: Any = LanguageModel
    network_field: str = "lm_tpl"
    model_entries: tuple[Entry, ...] = ()
    token_ids: Mapping[str, int] = dataclasses.field(default_factory=dict)
    counts: tuple[str, ...] = ("num_hidden_layers",)
    extra_layers: tuple[str, ...] = ()
    text_of: str | None = None

    @property
    def _owner(self) -> str:
        return f"config.json of a {self.model_type} model"

    def rows_for(self, names: Collection[str]) -> tuple[Row, ...]:
        """Return the rows of a folder with tensors of these names."""
        endings = tuple(row.name.rpartition("}")[2] for row in self.fused_rows)
        is_fused = bool(endings) and any(name.endswith(endings) for name in names)
        return replace_rows(self.rows, self.fused_rows) if is_fused else self.rows

    def drop_absent_layers(self, content: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
        """Return the content of a config.json without extra layers if a folder lacks them.

        Args:
          content: Content of config.json.
          names: Names of the tensors in the folder.
        """
        start = f"{self.prefix}layers.{content.get('num_hidden_layers')}."
        if any(name.startswith(start) for name in names):
            return content
        return {**content, **dict.fromkeys(self.extra_layers, 0)}

    def read_config(self, content: Mapping[str, Any]) -> Config:
        """Return the config of the model that the content of a config.json describes.

        Raises:
          UnsupportedModelError: An option is unsupported or unknown, or a value has a wrong type.
        """
        file = ConfigFile(content, owner=self._owner, neutral=self.neutral)
        try:
            network = self.network()
            for entry in self.entries:
                entry.read(file, network)
            model: Config = self.model_class.HParams.config(**{self.network_field: network})
            for entry in self.model_entries:
                entry.read(file, model)
        except UnsupportedModelError:
            raise
        except (TypeError, ValueError, AttributeError, KeyError, ArithmeticError) as error:
            assert file.last_key is not None
            expected = error.expected if isinstance(error, ConfigError) else None
            hint = None if expected else f"It cannot be read: {error}."
            raise file.invalid(file.last_key, expected, hint=hint) from error
        file.require_all_read()
        return model

    def check_layers(self, content: Mapping[str, Any], *, num_tensors: int) -> None:
        """Compare the numbers of layers with a number of tensors, before a config is read.

        An untrusted config.json may declare 10^9 layers, for each of which a template would be
        made.

        Raises:
          UnsupportedModelError: The model has more layers than tensors.
        """
        for key in (*self.counts, *self.extra_layers):
            part: Any = content
            for name in key.split("."):
                part = part.get(name) if isinstance(part, Mapping) else None
            count = len(part) if isinstance(part, (str, list)) else part
            self._check_count(key, count, num_tensors)

    def check_experts(self, model: Config, names: Collection[str]) -> None:
        """Compare the number of experts with tensors of their own with the tensors of a folder.

        Raises:
          UnsupportedModelError: The model has more experts, over all layers, than tensors.
        """
        if any(EXPERT in row.name for row in self.rows_for(names)):
            network = getattr(model, self.network_field)
            experts = [layer.feed_forward_tpl for layer in all_layers(network)]
            total = sum(getattr(one, "num_experts", 0) for one in experts)
            self._check_count("number of experts of all layers", total, len(names))

    def _check_count(self, field: str, count: Any, num_tensors: int) -> None:
        is_valid = not isinstance(count, int) or count <= num_tensors
        expected = f"at most {num_tensors}, the number of tensors in the folder"
        require(is_valid, self._owner, field, count, expected, UnsupportedModelError)

    def write_config(self, model: Config) -> dict[str, Any]:
        """Return the content of a config.json that describes a model.

        Raises:
          UnsupportedModelError, AttributeError, TypeError: The model has another structure.
        """
        if self.text_of is not None:
            raise UnsupportedModelError(
                field="family", value=self.model_type, expected=f"{self.text_of}, its text alone"
            )
        network = getattr(model, self.network_field)
        content: dict[str, Any] = {
            "model_type": self.model_type,
            "architectures": [self.architecture],
        }
        for entry in self.entries:
            content |= entry.write(network)
        for entry in self.model_entries:
            content |= entry.write(model)
        return content


def text_part(
    family: Family,
    model_type: str,
    *,
    prefix: str,
    renamed: tuple[str, str],
    others: str,
    neutral: frozenset[str],
) -> Family:
    """Return the family of a model of text and images, of which a family's text is read.

    Args:
      family: Family of the text, as which export writes it.
      model_type: `model_type` of the whole model.
      prefix: Prefix of the names of its tensors, which some folders leave out.
      renamed: (start of the names of the text's tensors, their start in the whole model).
      others: Regular expression of the names of the other tensors.
      neutral: Keys of the other parts, besides their configs.
    """
    before, after = renamed

    def rename(name: str) -> str:
        return after + name.removeprefix(before) if name.startswith(before) else name

    def rename_rows(rows: tuple[Row, ...]) -> tuple[Row, ...]:
        return tuple(dataclasses.replace(row, name=rename(row.name)) for row in rows)

    return dataclasses.replace(
        family,
        model_type=model_type,
        text_of=family.model_type,
        rows=rename_rows(family.rows),
        fused_rows=rename_rows(family.fused_rows),
        neutral=family.neutral | neutral | {"text_config", "vision_config"},
        prefix=prefix,
        copies={rename(copy): rename(of) for copy, of in family.copies.items()},
        buffers=rf"{family.buffers}|{others}",
    )
