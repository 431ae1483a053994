"""Networks with unrolled layers, for decoding on a CPU.

In a decoding step with stacked layers, XLA on a CPU copies the weights and the cache of each layer
out of the stack, and the cache back. This takes longer than the products.
"""

from __future__ import annotations

from typing import Any

import jax

from layerkit.base_layer import BaseLayer
from layerkit.config import field_names, is_config, target_of
from layerkit.layers.repeat import is_unrolled_by_default
from layerkit.layers.stacks import StackedTransformerRepeated, unrolled_stack


def unroll_layers(network: BaseLayer) -> tuple[BaseLayer, Any]:
    """Return a network without its variables, and these, with layers unrolled where this is faster.

    Stacks that `Repeat` unrolls by default are replaced: on a single CPU, those of few layers. Call
    this outside of the loop over the tokens, so that each weight is copied once.

    Args:
      network: Bound network, with a child `stack` of the field `stack_tpl`, or children such as
        `decoder` of fields such as `decoder_stack_tpl`.
    """
    bare, variables = network.unbind()
    for field in field_names(type(bare)):
        template = getattr(bare, field)
        if not (field.endswith("stack_tpl") and is_config(template)):
            continue
        if target_of(template) is not StackedTransformerRepeated or template.unroll is not None:
            continue
        child = "stack" if field == "stack_tpl" else field.removesuffix("_stack_tpl")
        stack = getattr(network, child)
        if not is_unrolled_by_default(network.inherited("sharding"), stack.num_layers):
            continue
        bare = bare.clone(**{field: unrolled_stack(template)})
        places = [stack.locate_layer(layer) for layer in range(stack.num_layers)]
        variables = {
            collection: _split(tree, child, places) for collection, tree in variables.items()
        }
    return bare, variables


def _split(tree: Any, child: str, places: list[tuple[tuple[str, ...], tuple[int, ...]]]) -> Any:
    """Return variables with those of each layer of a stack in the place of the stacked ones.

    Args:
      tree: Variables of one collection, nested dicts by layer path.
      child: Name of the stack.
      places: Path within the stack, and indices on the stacked axes, of each layer.
    """
    if child not in tree:
        return tree
    layers = {}
    for layer, (path, indices) in enumerate(places):
        found = tree[child]
        for name in path:
            found = found.get(name, {})
        layers[f"layers_{layer}"] = jax.tree.map(lambda x, at=indices: x[at], found)
    return {**tree, child: layers}
