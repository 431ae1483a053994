"""Layers of several kinds, such as layers with attention among layers with a recurrent mixer.

The entries of a family that read or write attention do not fit a layer without it. Here each kind
of layers has a table of its own, which reads and writes a network of such layers alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from layerkit.config import Config, target_of
from layerkit.interop.hugging_face.keys import ConfigFile, Entry, UnsupportedModelError, all_layers
from layerkit.interop.hugging_face.layer_types import stack_layers
from layerkit.layers.attention.multi_head import MultiHeadAttention

RECURRENT = "linear_attention"
"""Type of a layer with a recurrent mixer in `layer_types`."""

# Transformers 5 renames the types on the left.
_OLDER_TYPES = {"mamba": RECURRENT, "attention": "full_attention"}


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of layers.

    Attributes:
      matches: Function that returns True for the template of a layer of this kind.
      edit: Function that makes a template of this kind, in place, of one that attends and has a
        feed-forward.
      entries: Table of the keys of these layers, of paths `layer.…`.
    """

    matches: Callable[[Config], bool]
    edit: Callable[[Config], Any] = lambda template: None
    entries: tuple[Entry, ...] = ()


def has_mixer(mixer: Any) -> Callable[[Config], bool]:
    """Return the function that returns True for a template with a mixer of this class."""
    return lambda template: (
        template.attention_tpl is not None and target_of(template.attention_tpl) is mixer
    )


ATTENDING = Kind(has_mixer(MultiHeadAttention))
"""Layers that the entries of the network describe."""


def mixed_layers(
    entries: tuple[Entry, ...],
    kinds: Mapping[str, Kind],
    *,
    read_types: Callable[[ConfigFile, Config], list[str]],
    write_types: Callable[[list[str]], dict[str, Any]],
) -> Entry:
    """Return the entry of a network with layers of several kinds.

    Entries of keys that all kinds share, such as those of experts, may follow it.

    Args:
      entries: Table of the network and of its layers with attention.
      kinds: Kinds by their types. The keys of a kind are also read if no layer is of it.
      read_types: Function (file, network) → type of each layer; older names are renamed.
      write_types: Function from the type of each layer to keys.
    """

    def read(file: ConfigFile, network: Config) -> None:
        for entry in entries:
            entry.read(file, network)
        templates = {}
        for name, kind in kinds.items():
            part = network.clone()
            kind.edit(part.stack_tpl.layer_tpl)
            for entry in kind.entries:
                entry.read(file, part)
            templates[name] = part.stack_tpl.layer_tpl
        types = read_types(file, network)
        is_list = isinstance(types, (list, tuple)) and len(types) == network.num_layers
        types = [_OLDER_TYPES.get(kind, kind) for kind in types] if is_list else []
        if not types or not set(types) <= set(kinds):
            assert file.last_key is not None
            raise file.invalid(file.last_key, f"{', '.join(kinds)} for each of the layers")
        network.stack_tpl = stack_layers([templates[kind] for kind in types])

    def write(network: Config) -> dict[str, Any]:
        layers = all_layers(network)
        types = [
            next((name for name, kind in kinds.items() if kind.matches(layer)), None)
            for layer in layers
        ]
        named = [name for name in types if name is not None]
        if len(named) < len(types):
            raise UnsupportedModelError(
                field="layers", value=types, expected=f"kinds of {', '.join(kinds)}"
            )
        # Without a layer that attends, the entries of attention write defaults.
        attention = [layer.attention_tpl for layer in layers if ATTENDING.matches(layer)]
        attention = [*attention, MultiHeadAttention.HParams.config()]
        alone = _of_one_layer(network, layers[0])
        alone.stack_tpl.layer_tpl.attention_tpl = attention[0].clone()
        content = write_types(named)
        for entry in entries:
            content |= entry.write(alone)
        for name in dict.fromkeys(named):
            part = _of_one_layer(network, layers[named.index(name)])
            for entry in kinds[name].entries:
                content |= entry.write(part)
        return content

    return Entry(read, write)


def _of_one_layer(network: Config, layer: Config) -> Config:
    """Return a copy of a network that repeats one layer."""
    copy: Config = network.clone()
    copy.stack_tpl = stack_layers([layer])
    return copy
