"""Parts that Transformers over token ids share: embedding, softmax and stack of layers."""

from __future__ import annotations

from typing import Any

import jax

from layerkit.config import build
from layerkit.config.checks import require
from layerkit.config.field_checks import Conditions, derive_fields

# A tied softmax does not embed if there is a separate embedding.
TIED_EMBEDDING_CONDITIONS: Conditions = {
    "softmax_tpl.scale_by_sqrt_dims": "not embedding_tpl",
    "softmax_tpl.embedding_axes": "not embedding_tpl",
}


def create_token_layers(model: Any) -> None:
    """Create the children `softmax` and, unless the embedding is tied, `embedding`.

    Args:
      model: Layer with fields `vocab_size`, `model_dims`, `softmax_tpl` and `embedding_tpl`.

    Raises:
      ConfigError: `embedding_tpl` is None although the softmax cannot embed ids.
    """
    classes = {"num_classes": model.vocab_size, "input_dims": model.model_dims}
    model.create_child("softmax", model.softmax_tpl, **classes)
    if model.embedding_tpl is not None:
        model.create_child("embedding", model.embedding_tpl, **classes)
    else:
        expected = f"Embedding, since softmax_tpl is a {type(model.softmax).__name__}"
        require(hasattr(model.softmax, "embed"), model, "embedding_tpl", None, expected)


def embed_tokens(model: Any, ids: jax.Array) -> jax.Array:
    """Embed ids int32 `[batch, length]` as vectors `[batch, length, dims]`."""
    embed = model.softmax.embed if model.embedding_tpl is None else model.embedding
    vectors: jax.Array = embed(ids)
    return vectors


def stack_sizes(model: Any, *, num_layers: int) -> dict[str, Any]:
    """Return the fields that a model passes to a stack of `num_layers` layers."""
    return {
        "num_layers": num_layers,
        "input_dims": model.model_dims,
        "hidden_dims": model.hidden_dims,
        "num_heads": model.num_heads,
        "num_kv_heads": model.num_kv_heads,
        "dim_per_head": model.dim_per_head,
    }


def locate_in_stack(
    model: Any, layer: int, *, child: str, template: str, num_layers: int
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return the location of a layer's variables in those of an unbound model.

    Args:
      model: Model with the sizes of its stacks.
      layer: Index of the layer, from 0 at the input of the stack.
      child: Name of the stack.
      template: Name of the field with the stack's template.
      num_layers: Depth of the stack.

    Returns:
      The path of the layer's subtree, and the indices into the leading axes of each leaf there; see
      `StackedTransformer.locate_layer`.

    Raises:
      IndexError: The stack has no such layer.
    """
    sizes = stack_sizes(model, num_layers=num_layers)
    where = f"{type(model).__qualname__}.{template}"
    stack = build(derive_fields(getattr(model, template), where, **sizes))
    path, indices = stack.locate_layer(layer)
    return (child, *path), indices
