"""LoRA: fine-tuning by low-rank adapters beside the products of a model.

LoRA (Hu et al., 2021, arXiv:2106.09685) leaves a weight w alone and learns a product of two thin
matrices beside it:

    x·w + (alpha / rank) · (x·a)·b

b starts at 0, so that the model starts as what it was. An adapter is a `Dot` (see
`layerkit.layers.products`) around the one that multiplied before, so it goes wherever products
can be replaced, fp8 included. The weights of the model keep their paths, and those of an adapter
lie beside: `query/w`, `query/dot/lora_a`, `query/dot/lora_b`. So a checkpoint of the model without
adapters holds just what is missing here, and the other way round.

    config = with_lora(config, rank=8, only=".*(query|value)_tpl")

Training the adapters alone is the learner's business: the pattern `LORA_WEIGHTS` names them.
`merge_lora` turns what was trained into weights of the model as it was, and `without_lora` gives
the config of that model too.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.traverse_util import flatten_dict, unflatten_dict

from layerkit.base_layer import PARAMS
from layerkit.checks import check_positive, check_sizes
from layerkit.config import (
    Config,
    copy_config,
    field_names,
    is_config,
    sub_config_field,
    target_of,
    walk_configs,
)
from layerkit.layers.products import Dot, edit_products, weight_of_dot
from layerkit.layers.stochastic import Dropout
from layerkit.weights import WeightHParams, WeightInit

LORA_WEIGHTS = ".*/lora_[ab]"
"""Regular expression that matches the paths of LoRA weights, and no others."""

Path = tuple[str, ...]


class LoraDot(Dot):
    """x·w + (alpha / rank) · dropout(x)·a·b, for a weight of any layer.

    Weights: `lora_a` `[in, rank]`, normal with standard deviation 1/√in, and `lora_b`
    `[rank, out]`, which starts at 0. Here `in` and `out` stand for all dimensions of w that are
    contracted with the inputs and all others, such as `[rank, heads, head_dim]`, with the logical
    axes that they have in w. For a group of weights, such as experts, both have its dimension in
    front.

    Attributes:
      weight: The declaration of w, which its owner fills in.
      rank: Inner size of the adapter.
      alpha: Its strength; see the formula.
      dropout_rate: Of the inputs of the adapter, in training.
      dot_tpl: What multiplies x by w; None for the plain product.

    Raises:
      ValueError: a rank below 1, an alpha that is not positive, or a weight whose dimensions do not
        come in the order group, in, out.
    """

    weight: WeightHParams | None = None
    rank: int = 8
    alpha: float = 16.0
    dropout_rate: float = 0.0
    dot_tpl: Any = sub_config_field(None)

    def setup(self) -> None:
        check_sizes(self, rank=self.rank)
        check_positive(self, alpha=self.alpha)
        weight, num_group, num_in = self._split_weight()
        group, ins, outs = (
            slice(num_group),
            slice(num_group, num_group + num_in),
            slice(num_group + num_in, None),
        )
        shape, axes = weight.shape, weight.axes
        lora_a = WeightHParams(
            (*shape[group], *shape[ins], self.rank),
            (*axes[group], *axes[ins], None),
            init=WeightInit.FanIn(),
            dtype=weight.dtype,
            fan_in_dims=tuple(range(num_group, num_group + num_in)),
        )
        lora_b = WeightHParams(
            (*shape[group], self.rank, *shape[outs]),
            (*axes[group], None, *axes[outs]),
            init=WeightInit.Constant(0.0),
            dtype=weight.dtype,
        )
        self.create_variable("lora_a", lora_a)
        self.create_variable("lora_b", lora_b)
        self.create_child("dropout", Dropout.HParams.config(rate=self.dropout_rate))
        self.create_child("base", self.dot_tpl or Dot.HParams.config())

    def fprop(self, x: jax.Array, w: jax.Array) -> jax.Array:
        """`[..., in]` · `[in, out]` → `[..., out]`, in the dtype of both.

        With a group of weights: `[group, tokens, in]` · `[group, in, out]` →
        `[group, tokens, out]`.
        """
        a = self.theta.lora_a.reshape(*w.shape[:-1], self.rank)
        b = self.theta.lora_b.reshape(*w.shape[:-2], self.rank, w.shape[-1])
        low_rank = (self.dropout(x) @ a) @ b
        return self.base(x, w) + (self.alpha / self.rank) * low_rank

    @nn.nowrap
    def _split_weight(self) -> tuple[WeightHParams, int, int]:
        """(weight, how many of its dimensions are of a group, how many are contracted)."""
        weight = self.weight
        if weight is None:
            raise ValueError(
                f"{self.path_name}: weight is not set; use it as the dot_tpl of a layer"
            )
        last = len(weight.shape) - 1
        ins = tuple(range(last)) if weight.fan_in_dims is None else weight.fan_in_dims
        outs = (last,) if weight.fan_out_dims is None else weight.fan_out_dims
        if ins != tuple(range(ins[0], ins[0] + len(ins))) or min(outs) < max(ins):
            raise ValueError(
                f"{self.path_name}: LoRA needs a weight with the dimensions of a group first, then"
                " those contracted with the inputs, then the others; this one has the shape"
                f" {weight.shape}, contracts dimensions {ins} and gives {outs}"
            )
        return weight, ins[0], len(ins)


def with_lora(
    config: Config,
    *,
    rank: int = 8,
    alpha: float = 16.0,
    dropout_rate: float = 0.0,
    only: str = ".*",
) -> Config:
    """A copy of a model's config with an adapter beside its products.

    Args:
      config: Of a layer, a model, or anything that holds one.
      rank: Inner size of the adapters.
      alpha: Their strength: they are multiplied by alpha / rank.
      dropout_rate: Of their inputs, in training.
      only: Regular expression that the whole path of fields to a layer has to match, such as
        `.*(query|value)_tpl`.

    Raises:
      ValueError: no layer with products matches, or one has an adapter already.
    """

    def put(owner: Config) -> None:
        if _is_lora(owner.dot_tpl):
            raise ValueError(
                f"with_lora: {target_of(owner).__qualname__} has a LoraDot already; merge it first,"
                " or say by `only` which layers are meant"
            )
        owner.dot_tpl = LoraDot.HParams.config(
            rank=rank, alpha=alpha, dropout_rate=dropout_rate, dot_tpl=owner.dot_tpl
        )

    return edit_products(config, put, only=only)


def merge_lora(config: Config, variables: Any) -> Any:
    """Adds every adapter to the weight beside it: w + (alpha / rank) · a·b.

    Args:
      config: Of the model with adapters, for their alpha.
      variables: Of that model, `{collection: …}` of nested dicts of arrays `[...]`.

    Returns:
      Variables of the model without adapters, with the same outputs up to rounding.

    Raises:
      ValueError: there are no adapters, or they do not have the same alpha.
    """
    alpha, merged = _one_alpha(config), flatten_dict(variables)
    for dot in _adapter_paths(merged):
        target = (PARAMS, *dot[:-1], weight_of_dot(dot[-1]))
        merged[target] = _shifted(merged[target], merged, dot, alpha)
    for dot in _adapter_paths(merged):
        merged.pop((PARAMS, *dot, "lora_a"))
        merged.pop((PARAMS, *dot, "lora_b"))
        # What multiplied inside of the adapter multiplies alone now.
        for path in [p for p in merged if p[1 : len(dot) + 2] == (*dot, "base")]:
            merged[path[0], *dot, *path[len(dot) + 2 :]] = merged.pop(path)
    return unflatten_dict(merged)


def without_lora(config: Config, variables: Any) -> tuple[Config, Any]:
    """Return a model without adapters that computes the same.

    Args:
      config: Config of a layer or a model; it is not changed.
      variables: Its variables, `{collection: …}` of nested dicts of arrays `[...]`.

    Returns:
      (config, variables), with every adapter added to the weight beside it; the arguments where
      there is none.

    Raises:
      ValueError: The adapters have several values of alpha, or their weights are missing.
    """
    if not any(map(_is_lora, walk_configs(config))):
        return config, variables
    plain = copy_config(config)
    for owner in walk_configs(plain):
        if "dot_tpl" in field_names(owner) and _is_lora(owner.dot_tpl):
            owner.dot_tpl = owner.dot_tpl.dot_tpl
    return plain, merge_lora(config, variables)


def unmerge_lora(config: Config, merged: Any, variables: Any) -> Any:
    """The other way round: takes adapters out of the weights that `merge_lora` added them to.

    Args:
      config: Of the model with adapters, for their alpha.
      merged: What `merge_lora` gave, nested dicts of arrays `[...]`.
      variables: Of the model with the same adapters, `{collection: …}` likewise; only the adapters
        and what `merged` lacks are read.

    Returns:
      Variables of the model with adapters; the weights beside these are exact up to rounding.

    Raises:
      ValueError: there are no adapters, or they do not have the same alpha.
    """
    alpha, plain, found = _one_alpha(config), flatten_dict(merged), flatten_dict(variables)
    found |= {path: leaf for path, leaf in plain.items() if path in found}
    for dot in _adapter_paths(found):
        target = (PARAMS, *dot[:-1], weight_of_dot(dot[-1]))
        found[target] = _shifted(plain[target], found, dot, -alpha)
    return unflatten_dict(found)


def _shifted(w: jax.Array, flat: dict[Path, jax.Array], dot: Path, alpha: float) -> jax.Array:
    """w + (alpha / rank) · a·b in float32, cast to the dtype of w."""
    a, b = (flat[PARAMS, *dot, name].astype(jnp.float32) for name in ("lora_a", "lora_b"))
    # Leading dimensions of all three: repeated layers and groups.
    num_leading = a.ndim + b.ndim - 2 - w.ndim
    leading, rank = w.shape[:num_leading], a.shape[-1]
    outs = math.prod(b.shape[num_leading + 1 :])
    product = a.reshape(*leading, -1, rank) @ b.reshape(*leading, rank, outs)
    return (w.astype(jnp.float32) + (alpha / rank) * product.reshape(w.shape)).astype(w.dtype)


def _adapter_paths(flat: dict[Path, jax.Array]) -> list[Path]:
    """Paths of all adapters, without the collection."""
    found = [path[1:-1] for path in flat if path[0] == PARAMS and path[-1] == "lora_a"]
    if not found:
        raise ValueError("there are no LoRA weights (…/lora_a) in these variables")
    return found


def _is_lora(value: Any) -> bool:
    return is_config(value) and issubclass(target_of(value), LoraDot)


def _one_alpha(config: Config) -> float:
    alphas = {found.alpha for found in walk_configs(config) if _is_lora(found)}
    if len(alphas) != 1:
        raise ValueError(
            f"the config has {len(alphas)} values of LoraDot.alpha ({sorted(alphas)}), expected one"
        )
    return alphas.pop()
