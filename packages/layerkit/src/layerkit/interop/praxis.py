"""The names and layouts of the weights of Praxis' models, mapped to those of this library.

The models are its TransformerLm and the decoder of TimesFM.

`find_sources` returns, for each weight of a model of this library, the weights of Praxis that it
consists of. The result reads arrays, and everything that has the same tree: averages and moments of
an optimizer.

Names are paths joined by `/` and start at the model, such as `lm/softmax/w`. Praxis keeps layers as
`x_layers_<i>`, as one weight per repetition (`repeat/sub`) or per pipeline stage
(`pipeline/body`); the axes of repetitions, in both libraries, come first and are in the order of
the layers.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

if TYPE_CHECKING:
    import tensorstore as ts


class PraxisWeight(NamedTuple):
    """A weight of Praxis from which a weight of this library is read.

    Attributes:
      name: Path in Praxis, from the model or from the layer.
      rank: Number of axes in Praxis without those over layers.
      part: Index on the first axis, for a weight that holds several; None for the whole weight.
      transpose: Axis of Praxis, after `part`, of each axis of this library; None for equal axes.
      has_heads: True if the second axis from the end is that of heads, which Praxis leaves out of
        the one key and value head of multi-query attention.
    """

    name: str
    rank: int
    part: int | None = None
    transpose: tuple[int, ...] | None = None
    has_heads: bool = False


Shape = tuple[int, ...]

_Choices = dict[str, tuple[PraxisWeight, ...]]


def _projection(name: str, part: int) -> _Choices:
    """Return the sources of a projection to heads, which Praxis may combine with two others."""
    return {
        f"attention/{name}/{weight}": (
            PraxisWeight(f"self_attention/combined_qkv/{weight}", rank + 1, part),
            PraxisWeight(f"self_attention/{name}/{weight}", rank, has_heads=True),
        )
        for weight, rank in (("w", 3), ("b", 2))
    }


def _dense(name: str, praxis_name: str) -> _Choices:
    """Return the sources of a projection of the feed-forward block and of its bias."""
    return {
        f"feed_forward/{name}/w": (PraxisWeight(f"ff_layer/{praxis_name}/linear/w", 2),),
        f"feed_forward/{name}_bias/b": (PraxisWeight(f"ff_layer/{praxis_name}/bias/b", 1),),
    }


def _norm(name: str, *praxis_names: str) -> _Choices:
    return {
        f"{name}/{weight}": tuple(PraxisWeight(f"{other}/{weight}", 1) for other in praxis_names)
        for weight in ("scale", "bias")
    }


def _branch_norms(name: str, prefix: str) -> _Choices:
    """Return the sources of the norms before and after a branch, by Praxis' `norm_policy`.

    `primer_hybrid` has both norms. `post` has the second alone, under the name that the first one
    has in `pre` and `post_skip`.
    """
    return {
        **_norm(f"{name}_norm", f"{prefix}layer_norm", f"{prefix}pre_layer_norm"),
        **_norm(f"{name}_post_norm", f"{prefix}post_layer_norm", f"{prefix}layer_norm"),
    }


# Weights outside the layers. The first name that Praxis has is the source.
LM_WEIGHTS: _Choices = {
    **_norm("lm/final_norm", "lm/final_ln"),
    "lm/softmax/b": (PraxisWeight("lm/softmax/logits_ffn/bias/b", 1),),
    "lm/softmax/w": (PraxisWeight("lm/softmax/logits_ffn/linear/w", 2),),
    "lm/embedding/w": (PraxisWeight("lm/embedding_lookup/emb_var", 2),),
    "lm/position/w": (PraxisWeight("lm/position_emb/emb_var", 2),),
}
# Weights outside the layers of TimesFM's decoder, alone or in Pax's model for fine-tuning.
SERIES_WEIGHTS: _Choices = {
    "frequency/w": tuple(
        PraxisWeight(f"{prefix}freq_emb/emb_var", 2) for prefix in ("", "core_layer/")
    ),
    **{
        f"{block}/{layer}/{weight}": tuple(
            PraxisWeight(f"{prefix}{block}_ff_layer/{layer}_layer/{weight}", rank)
            for prefix in ("", "core_layer/")
        )
        for block in ("input", "horizon")
        for layer in ("hidden", "output", "residual")
        for weight, rank in (("linear/w", 2), ("bias/b", 1))
    },
}
# A tied weight is [num_classes, dims] here and [dims, num_classes] in Praxis.
TIED_SOFTMAX = PraxisWeight("lm/softmax/logits_ffn/linear/w", 2, transpose=(1, 0))
# That of Praxis' GShardSharedEmbeddingSoftmax is as here.
GSHARD_SOFTMAX = PraxisWeight("lm/softmax/embedding/w", 2)

# Weights of a layer, by paths within it.
LAYER_WEIGHTS: _Choices = {
    **_branch_norms("attention", ""),
    **_norm("attention/query_norm", "self_attention/layer_norm_q"),
    **_norm("attention/key_norm", "self_attention/layer_norm_k"),
    **_projection("query", 0),
    **_projection("key", 1),
    **_projection("value", 2),
    # [3, dims, heads, head_dim] in Praxis, [dims, heads, 3, head_dim] here.
    "attention/qkv/w": (PraxisWeight("self_attention/combined_qkv/w", 4, transpose=(1, 2, 0, 3)),),
    "attention/qkv/b": (PraxisWeight("self_attention/combined_qkv/b", 3, transpose=(1, 0, 2)),),
    # [dims, heads, head_dim] in Praxis, [heads, head_dim, dims] here.
    "attention/output/w": (PraxisWeight("self_attention/post/w", 3, transpose=(1, 2, 0)),),
    "attention/output/b": (PraxisWeight("self_attention/post/b", 1),),
    # [heads, buckets] in Praxis, [buckets, heads] here.
    "attention/relative_bias/w": (
        PraxisWeight("self_attention/relative_bias/wrb", 2, transpose=(1, 0)),
    ),
    "attention/scale": (PraxisWeight("self_attention/per_dim_scale/per_dim_scale", 1),),
    **_branch_norms("feed_forward", "ff_layer/"),
    **_dense("up", "ffn_layer1"),
    **_dense("gate", "ffn_layer1_gate"),
    **_dense("down", "ffn_layer2"),
    # Mixtures of experts.
    "feed_forward/router/w": (PraxisWeight("ff_layer/gate", 2),),
    "feed_forward/up": (PraxisWeight("ff_layer/wi_0", 3),),
    "feed_forward/gate": (PraxisWeight("ff_layer/wi_gate_0", 3),),
    "feed_forward/down": (PraxisWeight("ff_layer/wo_0", 3),),
}

_OUR_LAYER = re.compile(
    r"(?:lm/)?stack/(?P<stacked>(?:pipeline/stage/)?repeat/sub/)?(?:layers_(?P<index>\d+)/)?(?P<name>.+)"
)
_PRAXIS_LAYER = re.compile(
    r"(?:lm/transformer|(?:core_layer/)?stacked_transformer_layer)/"
    r"(?:pipeline/body/)?(?:repeat/sub/)?x_layers_(?P<index>\d+)/(?P<name>.+)"
)


@dataclasses.dataclass(frozen=True)
class WeightSource:
    """The weights of Praxis that make one weight of this library.

    Attributes:
      names: Names of the weights in Praxis: one, or one for each layer of a repetition.
      weight: Part and order of the axes that are read from each.
      is_stacked: True if the weight of this library has axes over layers.
      layers: Layers that it holds; None for a weight outside the layers.
    """

    names: tuple[str, ...]
    weight: PraxisWeight
    is_stacked: bool = False
    layers: slice | None = None

    def view(
        self, open_array: Callable[[str], ts.TensorStore], like: Shape
    ) -> ts.TensorStore | None:
        """Return the weight as a view of the stored arrays; a read of a block reads no more.

        The value is None if Praxis has no such layer.

        Args:
          open_array: Function that opens a weight of Praxis, `[...layers, (parts), ...]`.
          like: Shape in the model. Its axes over layers are used if they hold as many layers.

        Raises:
          ValueError: The weights differ in shape or dtype, or have too few axes.
        """
        import tensorstore as ts

        weight, arrays = self.weight, [open_array(name) for name in self.names]
        shapes = sorted({tuple(array.shape) for array in arrays})
        if len(shapes) > 1:
            raise ValueError(f"layers of shapes {[list(shape) for shape in shapes]}")
        if self.lacks_heads(shapes[0], like):
            arrays = [array[..., None, :] for array in arrays]
        num_leading = 0 if self.layers is None else arrays[0].rank - weight.rank
        if num_leading < 0 or arrays[0].rank - num_leading != weight.rank:
            raise ValueError(
                f"{self.names[0]} has shape {list(shapes[0])}, and {weight.rank} axes fit"
            )
        # [...layers, names, (parts), ...]
        stacked = ts.stack(arrays, num_leading)
        first = num_leading + 1
        if weight.part is not None:
            stacked = stacked[(slice(None),) * first + (weight.part,)]
        order = weight.transpose or range(stacked.rank - first)
        stacked = stacked.transpose((*range(first), *(first + axis for axis in order)))
        if self.layers is None:
            return stacked[0]
        numbers = np.arange(math.prod(stacked.shape[:first]))[self.layers]
        if not numbers.size:
            return None
        over_layers: Shape = like[: len(like) - len(order)] if self.is_stacked else ()
        if self.is_stacked and math.prod(over_layers) != numbers.size:
            over_layers = numbers.shape
        return stacked.vindex[np.unravel_index(numbers.reshape(over_layers), stacked.shape[:first])]

    def lacks_heads(self, stored: Shape, like: Shape) -> bool:
        """Return whether Praxis leaves out the axis of the one head of a weight of shape `like`."""
        return self.weight.has_heads and like[-2] == 1 and stored[-2:-1] != (1,)


def find_sources(ours: Collection[str], praxis: Collection[str]) -> dict[str, WeightSource]:
    """Return the source of each weight of a model that has one.

    Args:
      ours: Names of the weights of a LanguageModel of this library, without `params/`.
      praxis: Names of the weights of the model in Praxis, without `params/`.
    """
    # The full names of each weight of a layer, by the index of the layer in a repetition. A weight
    # need not exist in all layers.
    layers: dict[str, dict[int, str]] = {}
    matches = [match for name in praxis if (match := _PRAXIS_LAYER.fullmatch(name))]
    for match in sorted(matches, key=lambda match: int(match["index"])):
        layers.setdefault(match["name"], {})[int(match["index"])] = match[0]
    # Number of layers of a repetition, or of all layers if nothing repeats.
    period = 1 + max((int(match["index"]) for match in matches), default=0)
    parts = ("pipeline/body/", "repeat/sub/")
    repeats = any(part in match[0] for match in matches for part in parts)
    our_layers = {name: match for name in ours if (match := _OUR_LAYER.fullmatch(name))}
    pattern_length = 1 + max(map(_block_of, our_layers.values()), default=0)

    def source_of_layer(match: re.Match[str], weight: PraxisWeight) -> WeightSource | None:
        names = layers[weight.name]
        if match["stacked"] is None:
            layer = int(match["index"])
            repetition, index = divmod(layer, period) if repeats else (0, layer)
            held = slice(repetition, repetition + 1)
            return WeightSource((names[index],), weight, layers=held) if index in names else None
        block, held = _block_of(match), slice(None)
        if repeats and period % pattern_length:  # All layers are alike.
            full_names, held = tuple(names.values()), slice(block, None, pattern_length)
        else:
            full_names = tuple(n for i, n in names.items() if i % pattern_length == block)
        source = WeightSource(full_names, weight, is_stacked=True, layers=held)
        return source if full_names else None

    sources: dict[str, WeightSource | None] = {}
    for name in ours:
        known = layers if name in our_layers else praxis
        weight = next((w for w in _choices(name, ours) if w.name in known), None)
        if weight is not None and name in our_layers:
            sources[name] = source_of_layer(our_layers[name], weight)
        elif weight is not None:
            sources[name] = WeightSource((weight.name,), weight)
    return {name: source for name, source in sources.items() if source is not None}


def axis_order(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the axes of each weight in the order that they have in Praxis.

    Args:
      params: Weights of a model `[...]` without axes over layers, nested dicts.

    Returns:
      A tree like `params` with a tuple of axes for each weight, such as (2, 0, 1) for the output
      projection `[heads, head_dim, dims]`. Weights that Praxis lacks keep their order.
    """
    flat = flatten_dict(params, sep="/")
    orders: dict[str, tuple[int, ...]] = {}
    for name, weight in flat.items():
        choices = _choices(name, flat)
        order = (choices[0].transpose if choices else None) or range(weight.ndim)
        orders[name] = tuple(int(axis) for axis in np.argsort(order))
    return unflatten_dict(orders, sep="/")


def _block_of(match: re.Match[str]) -> int:
    """Return the index in the repeated pattern of a weight of a layer; 0 if it is not stacked."""
    return int(match["index"] or 0) if match["stacked"] is not None else 0


def _choices(name: str, ours: Collection[str]) -> tuple[PraxisWeight, ...]:
    """Return the weights of Praxis, or of a layer of it, that a weight can be read from."""
    if name == "lm/softmax/w" and "lm/embedding/w" not in ours:
        return (TIED_SOFTMAX, GSHARD_SOFTMAX)
    match = _OUR_LAYER.fullmatch(name)
    if match is None:
        return LM_WEIGHTS.get(name, ()) or SERIES_WEIGHTS.get(name, ())
    choices = LAYER_WEIGHTS.get(match["name"], ())
    # A layer with a norm before and one after a branch is of `primer_hybrid`.
    has_both = "_post_norm/" in name and name.replace("_post_norm/", "_norm/") in ours
    return choices[:1] if has_both else choices
