"""Entries of config.json that several families share and that need more than one key or field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from layerkit.config import Config, target_of
from layerkit.interop.hugging_face.keys import (
    ConfigFile,
    Entry,
    UnsupportedModelError,
    get_field,
    set_field,
)
from layerkit.interop.hugging_face.layouts import INTO_HEADS, LINEAR, OUT_OF_HEADS, Layout
from layerkit.interop.hugging_face.tensors import EXPERT, Row
from layerkit.layers.basic.elementwise import (
    GELU,
    Identity,
    LeakyReLU,
    ReLU,
    ReLU6,
    Sigmoid,
    SiLU,
    SquaredReLU,
    Tanh,
)
from layerkit.layers.basic.embeddings import Embedding, FullSoftmax, SharedEmbeddingSoftmax
from layerkit.layers.basic.normalizations import LayerNormPerHead

# Keys in order of preference: export writes the first one that matches.
ACTIVATIONS: dict[str, Config] = {
    "silu": SiLU.HParams.config(),
    "swish": SiLU.HParams.config(),
    "relu": ReLU.HParams.config(),
    "gelu_new": GELU.HParams.config(approximate=True),
    "gelu_pytorch_tanh": GELU.HParams.config(approximate=True),
    "gelu": GELU.HParams.config(approximate=False),
    "gelu_fast": GELU.HParams.config(approximate=True),
    "gelu_accurate": GELU.HParams.config(approximate=True),
    "gelu_python_tanh": GELU.HParams.config(approximate=True),
    "gelu_python": GELU.HParams.config(approximate=False),
    "quick_gelu": SiLU.HParams.config(beta=1.702),
    "relu2": SquaredReLU.HParams.config(),
    "relu6": ReLU6.HParams.config(),
    "leaky_relu": LeakyReLU.HParams.config(),
    "sigmoid": Sigmoid.HParams.config(),
    "tanh": Tanh.HParams.config(),
    "linear": Identity.HParams.config(),
}


def activation(
    name: str, default: str, path: str = "layer.feed_forward_tpl.activation_tpl"
) -> Entry:
    """Return the entry of an activation.

    Args:
      name: Name of the key.
      default: Value of Transformers if the key is left out, and the preferred spelling.
      path: Path of the field, by default that of the feed-forward.
    """

    def read(file: ConfigFile, network: Config) -> None:
        spelling = file.get(name, default)
        if spelling not in ACTIVATIONS:
            raise file.invalid(name, choices=ACTIVATIONS)
        set_field(network, path, ACTIVATIONS[spelling].clone())

    def write(network: Config) -> dict[str, Any]:
        return {name: spelling_of(get_field(network, path), preferred=default)}

    return Entry(read, write)


def nested(
    name: str,
    path: str,
    *entries: Entry,
    model_entries: tuple[Entry, ...] = (),
    defaults: Mapping[str, Any] | None = None,
    shared: tuple[str, ...] = (),
    neutral: frozenset[str] = frozenset(),
) -> Entry:
    """Return the entry of a nested config, such as `vision_config`.

    Args:
      name: Name of the key.
      path: Path of the part of the model that the nested config describes.
      *entries: Entries of the part.
      model_entries: Further entries of the nested config, for fields of the model itself.
      defaults: Values of Transformers for keys that have no default elsewhere.
      shared: Keys that the whole config may have as well, where they take precedence.
      neutral: Keys that do not change the computation.
    """

    def read(file: ConfigFile, model: Config) -> None:
        # Older files of CLIP repeat keys in a second config, which takes precedence.
        first, second = (file.get(key, None) or {} for key in (name, f"{name}_dict"))
        if not (isinstance(first, Mapping) and isinstance(second, Mapping)):
            raise file.invalid(name, "an object")
        for key_of_part in first:  # `read_json` adds the keys of `text_config` to the others.
            file.get(key_of_part, None)
        whole = {key: value for key in shared if (value := file.get(key, None)) is not None}
        content = {**(defaults or {}), **first, **second, **whole}
        part = ConfigFile(content, owner=f"{file.owner}: {name}", neutral=neutral)
        for entry in entries:
            entry.read(part, get_field(model, path))
        for entry in model_entries:
            entry.read(part, model)
        part.require_all_read()

    def write(model: Config) -> dict[str, Any]:
        written: dict[str, Any] = {}
        for entry in entries:
            written |= entry.write(get_field(model, path))
        for entry in model_entries:
            written |= entry.write(model)
        return {name: written, **{key: written[key] for key in shared}}

    return Entry(read, write)


def spelling_of(activation: Config, *, preferred: str) -> str:
    """Return the name of an activation in config.json.

    Raises:
      UnsupportedModelError: The activation has no name there.
    """
    for spelling in (preferred, *ACTIVATIONS):
        if ACTIVATIONS[spelling] == activation:
            return spelling
    raise UnsupportedModelError(
        field="activation", value=target_of(activation).__qualname__, choices=ACTIVATIONS
    )


def tied_embedding(*, default: bool, scale_by_sqrt_dims: bool = False) -> Entry:
    """Return the entry of `tie_word_embeddings`.

    Args:
      default: Value of Transformers if the key is left out.
      scale_by_sqrt_dims: Multiply embeddings by √dims (Gemma).
    """

    def read(file: ConfigFile, network: Config) -> None:
        tied = file.get("tie_word_embeddings", default)
        put_embedding(network, tied=tied, scale_by_sqrt_dims=scale_by_sqrt_dims)

    return Entry(read, lambda network: {"tie_word_embeddings": network.embedding_tpl is None})


def put_embedding(network: Config, *, tied: bool, scale_by_sqrt_dims: bool = False) -> None:
    """Set the embedding and the softmax of a network."""
    if tied:
        network.embedding_tpl = None
        network.softmax_tpl = SharedEmbeddingSoftmax.HParams.config()
        network.softmax_tpl.scale_by_sqrt_dims = scale_by_sqrt_dims
    else:
        network.embedding_tpl = Embedding.HParams.config()
        network.embedding_tpl.scale_by_sqrt_dims = scale_by_sqrt_dims
        network.softmax_tpl = FullSoftmax.HParams.config()


def embedding_rows(
    embedding: str, network: str = "lm", *, head: str = "lm_head.weight"
) -> tuple[Row, ...]:
    """Return the rows of the embedding and of the head of a network, tied or separate."""
    separate, softmax = f"{network}/embedding/w", f"{network}/softmax/w"
    as_it_is = "vocab embed -> vocab embed"
    return (
        Row(embedding, separate, as_it_is),
        Row(embedding, softmax, as_it_is, instead_of=separate),
        Row(head, softmax, "vocab embed -> embed vocab", beside=separate),
    )


_LAYOUTS = dict.fromkeys(("query", "key", "value"), INTO_HEADS) | {"output": OUT_OF_HEADS}


def layer_rows(
    names: Mapping[str, str],
    layout: str | None = None,
    *,
    joined_axis: int | None = None,
    **fields: Any,
) -> tuple[Row, ...]:
    """Return the rows of linear layers and of norms, each with a weight and perhaps a bias.

    Args:
      names: Path of the layer → name of its tensors, without `.weight` and `.bias`. The end of the
        path distinguishes norms and projections to and from heads from others.
      layout: Layout of the weights; None for that of the path.
      joined_axis: See `Row`.
      **fields: Other fields of `Row`.
    """
    rows: list[Row] = []
    for ours, theirs in names.items():
        weight, bias = theirs + ".weight", theirs + ".bias"
        chosen = layout or _LAYOUTS.get(ours.rpartition("/")[2], LINEAR)
        if ours.endswith("norm"):
            rows += [Row(weight, ours + "/scale", layout or "dims -> dims", **fields)]
            rows += [Row(bias, ours + "/bias", **fields)]
        elif EXPERT in theirs:
            rows += [Row(weight, ours, chosen, **fields)]
        else:
            outputs = " ".join(Layout.parse(chosen).theirs[0])
            place = ours + ("_bias/b" if chosen == LINEAR else "/b"), f"({outputs}) -> {outputs}"
            rows += [Row(weight, ours + "/w", chosen, joined_axis, **fields)]
            rows += [Row(bias, *place, joined_axis, **fields)]
    return tuple(rows)


def qk_norms(name: str, *, per_head: bool = False) -> Entry:
    """Return the entry of a switch of norms of queries and keys, to be read after the epsilons.

    Args:
      name: Name of the key.
      per_head: True for norms with weights for each head; False for those of the other norms.
    """
    attention = "layer.attention_tpl."

    def read(file: ConfigFile, network: Config) -> None:
        if file.get(name, default=False):
            norm = network.final_norm_tpl.clone()
            if per_head:
                fields = {"scale_offset": 0.0, "use_bias": False, "epsilon": norm.epsilon}
                norm = LayerNormPerHead.HParams.config(**fields)
            set_field(network, attention + "qk_norm_tpl", norm)
            set_field(network, attention + "qk_norm_before_rotary", value=True)

    def write(network: Config) -> dict[str, Any]:
        return {name: get_field(network, attention + "qk_norm_tpl") is not None}

    return Entry(read, write)


def gated_names(ours: str, theirs: str) -> dict[str, str]:
    """Return the names of a gated feed-forward in Llama, for `layer_rows`."""
    return {f"{ours}{name}": f"{theirs}{name}_proj" for name in ("gate", "up", "down")}
