"""What Transformers over token ids have in common: how ids enter and leave, and their stacks."""

from __future__ import annotations

from typing import Any

import jax

from layerkit.config import build
from layerkit.derived_fields import derive_fields
from layerkit.field_checks import Conditions

# A softmax that is tied to the embedding embeds nothing where there is a separate embedding.
TIED_EMBEDDING_CONDITIONS: Conditions = {
    "softmax_tpl.scale_by_sqrt_dims": "not embedding_tpl",
    "softmax_tpl.embedding_axes": "not embedding_tpl",
}


def create_token_layers(model: Any) -> None:
    """Creates the children `softmax` and, where it is not tied to that, `embedding`.

    Args:
      model: With fields `vocab_size`, `model_dims`, `softmax_tpl` and `embedding_tpl`.

    Raises:
      ValueError: nothing embeds the ids.
    """
    classes = {"num_classes": model.vocab_size, "input_dims": model.model_dims}
    model.create_child("softmax", model.softmax_tpl, **classes)
    if model.embedding_tpl is not None:
        model.create_child("embedding", model.embedding_tpl, **classes)
    elif not hasattr(model.softmax, "embed"):
        raise ValueError(
            f"{model.path_name}: embedding_tpl is not set, and the {type(model.softmax).__name__}"
            " in softmax_tpl cannot embed ids; set embedding_tpl=Embedding.HParams.config(),"
            " or a softmax_tpl that is tied to the embedding"
        )


def embed_tokens(model: Any, ids: jax.Array) -> jax.Array:
    """Vectors `[batch, length, dims]` of ids int32 `[batch, length]`, by what was created above."""
    embed = model.softmax.embed if model.embedding_tpl is None else model.embedding
    vectors: jax.Array = embed(ids)
    return vectors


def stack_sizes(model: Any, *, num_layers: int) -> dict[str, Any]:
    """What a model hands down to a stack of so many layers."""
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
    """Where the variables of a layer lie in those of a model that is not bound.

    Args:
      model: With the sizes of its stacks.
      layer: Counted from 0 at the input of the stack.
      child: Name of the stack.
      template: The field that holds its template.
      num_layers: Of the stack.

    Returns:
      The path of the layer's subtree, and the indices into the leading axes of every leaf there;
      see `StackedTransformer.locate_layer`.

    Raises:
      IndexError: there is no such layer.
    """
    sizes = stack_sizes(model, num_layers=num_layers)
    where = f"{type(model).__qualname__}.{template}"
    stack = build(derive_fields(getattr(model, template), where, **sizes))
    path, indices = stack.locate_layer(layer)
    return (child, *path), indices
