"""What the configs of several families have in common, and one key alone does not say."""

from __future__ import annotations

import dataclasses
from typing import Any

from layerkit.config import Config, target_of
from layerkit.interop.hugging_face.keys import (
    ConfigFile,
    UnsupportedModelError,
    get_field,
    set_field,
)
from layerkit.interop.hugging_face.tensors import Row
from layerkit.layers.activations import GELU, ReLU, SiLU
from layerkit.layers.embeddings import Embedding, FullSoftmax, SharedEmbeddingSoftmax
from layerkit.near_names import near_names

# First the spelling that is written.
ACTIVATIONS: dict[str, Config] = {
    "silu": SiLU.HParams.config(),
    "swish": SiLU.HParams.config(),
    "relu": ReLU.HParams.config(),
    "gelu_new": GELU.HParams.config(approximate=True),
    "gelu_pytorch_tanh": GELU.HParams.config(approximate=True),
    "gelu": GELU.HParams.config(approximate=False),
}


@dataclasses.dataclass(frozen=True)
class Activation:
    """The non-linearity of the feed-forward.

    Attributes:
      name: The key.
      default: What Transformers takes where it is left out, and how its function is spelt.
    """

    name: str
    default: str
    path: str = "layer.feed_forward_tpl.activation_tpl"

    def read(self, file: ConfigFile, network: Config) -> None:
        spelling = file.get(self.name, self.default)
        if spelling not in ACTIVATIONS:
            near = near_names(str(spelling), ACTIVATIONS)
            raise file.refuse(self.name, f"is not supported{near} Supported: {[*ACTIVATIONS]}")
        set_field(network, self.path, ACTIVATIONS[spelling].clone())

    def write(self, network: Config) -> dict[str, Any]:
        return {self.name: spelling_of(get_field(network, self.path), preferred=self.default)}


def spelling_of(activation: Config, *, preferred: str) -> str:
    """How config.json spells an activation.

    Raises:
      UnsupportedModelError: it does not.
    """
    for spelling in (preferred, *ACTIVATIONS):
        if ACTIVATIONS[spelling] == activation:
            return spelling
    raise UnsupportedModelError(f"activation {target_of(activation).__qualname__}")


@dataclasses.dataclass(frozen=True)
class TiedEmbedding:
    """Whether the softmax has the weight of the embedding.

    Attributes:
      default: Where the file does not say.
      scale_by_sqrt_dims: Whether embeddings are multiplied by √dims (Gemma).
    """

    default: bool
    scale_by_sqrt_dims: bool = False

    def read(self, file: ConfigFile, network: Config) -> None:
        tied = file.get("tie_word_embeddings", self.default)
        put_embedding(network, tied=tied, scale_by_sqrt_dims=self.scale_by_sqrt_dims)

    def write(self, network: Config) -> dict[str, Any]:
        return {"tie_word_embeddings": network.embedding_tpl is None}


def put_embedding(network: Config, *, tied: bool, scale_by_sqrt_dims: bool = False) -> None:
    """Gives a network its embedding and its softmax."""
    if tied:
        network.embedding_tpl = None
        network.softmax_tpl = SharedEmbeddingSoftmax.HParams.config()
        network.softmax_tpl.scale_by_sqrt_dims = scale_by_sqrt_dims
    else:
        network.embedding_tpl = Embedding.HParams.config()
        network.embedding_tpl.scale_by_sqrt_dims = scale_by_sqrt_dims
        network.softmax_tpl = FullSoftmax.HParams.config()


def embedding_rows(embedding: str) -> tuple[Row, ...]:
    """Where the embedding lies, and the head, tied to it or not."""
    as_it_is = "vocab embed -> vocab embed"
    separate = "lm/embedding/w"
    return (
        Row(embedding, separate, as_it_is),
        Row(embedding, "lm/softmax/w", as_it_is, instead_of=separate),
        Row("lm_head.weight", "lm/softmax/w", "vocab embed -> embed vocab", beside=separate),
    )


@dataclasses.dataclass(frozen=True)
class KeyValueHeads:
    """`num_key_value_heads`; None and as many as query heads are the same.

    Attributes:
      default: What Transformers takes where it is left out.
    """

    default: int | None = None

    def read(self, file: ConfigFile, network: Config) -> None:
        network.num_kv_heads = file.get("num_key_value_heads", self.default) or network.num_heads

    def write(self, network: Config) -> dict[str, Any]:
        return {"num_key_value_heads": network.num_kv_heads or network.num_heads}


@dataclasses.dataclass(frozen=True)
class HeadDim:
    """`head_dim`; left out, heads share the model dimension.

    Attributes:
      default: What Transformers takes where it is left out.
    """

    default: int | None = None

    def read(self, file: ConfigFile, network: Config) -> None:
        given = file.get("head_dim", self.default)
        network.dim_per_head = given or network.model_dims // network.num_heads

    def write(self, network: Config) -> dict[str, Any]:
        return {"head_dim": network.dim_per_head or network.model_dims // network.num_heads}
