"""LoRA: fine-tuning by low-rank adapters of the weights of a model.

LoRA (Hu et al., 2021, arXiv:2106.09685) keeps a weight w and learns the product of two thin
matrices, which is added to it:

    x·w + (alpha / rank) · (x·a)·b

b starts at 0, so the outputs of the model do not change at first. An adapter is a `Dot` (see
`layerkit.layers.basic.dots`) that wraps the `Dot` of the layer, such as `Fp8Dot`. The weights of
the model keep their paths: `query/w` stays; `query/dot/lora_a` and `query/dot/lora_b` are new.

    config = add_lora(config, rank=8, only=".*(query|value)_tpl")

Give the learner the pattern `LORA_WEIGHTS` to train the adapters alone. `merge_lora` adds trained
adapters to the weights of the model; `remove_lora` also returns the config without adapters.

rsLoRA (Kalajdzievski, 2023, arXiv:2312.03732) divides by √rank instead of rank. DoRA (Liu et al.,
2024, arXiv:2402.09353) also learns the norm m of each column of the adapted weight W:

    x·W · m / ‖W‖
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import lax

from layerkit.base.weights import WeightHParams, WeightInit
from layerkit.config import (
    Config,
    build,
    copy_config,
    field_names,
    is_config,
    sub_config_field,
    target_of,
    walk_configs,
)
from layerkit.config.checks import check_positive, check_sizes, require
from layerkit.errors import ConfigError
from layerkit.layers.basic.dots import (
    Dot,
    GroupedArray,
    GroupedProduct,
    edit_products,
    weight_of_dot,
)
from layerkit.layers.basic.elementwise import Dropout
from layerkit.layers.quantization.stored_weights import dequantize_model

LORA_WEIGHTS = ".*/lora_(a|b|magnitude)"
"""Regular expression that matches the paths of LoRA weights and no others."""

Path = tuple[str, ...]
_WEIGHTS = ("lora_a", "lora_b", "lora_magnitude")


class LoraDot(Dot):
    """A low-rank adapter of a weight: x·w + (alpha / rank) · dropout(x)·a·b.

    Weights: `lora_a` `[in, rank]`, normal with standard deviation 1/√in, and `lora_b`
    `[rank, out]`, which starts at 0. `in` stands for all dimensions of w that are contracted with
    the inputs and `out` for all others, such as `[rank, heads, head_dim]`; they keep their logical
    axes. For a group of weights, such as experts, both start with the group's dimension.
    `lora_magnitude` `[out]` of DoRA is the change of the norms of the columns of w. It starts at 0.

    Attributes:
      weight: Declaration of w, which the owning layer sets.
      rank: Inner size of the adapter.
      alpha: Strength of the adapter; see the formula.
      rank_stabilized: Divide alpha by √rank instead of by rank (rsLoRA).
      has_magnitude: Learn the norms of the columns of the adapted weight (DoRA).
      dropout_rate: Dropout rate of the adapter's inputs in training.
      dot_tpl: `Dot` that multiplies x by w; None for the plain product.

    Raises:
      ConfigError: A rank below 1, an alpha that is not positive, or a weight whose dimensions are
        not in the order group, in, out.
    """

    weight: WeightHParams | None = None
    rank: int = 8
    alpha: float = 16.0
    rank_stabilized: bool = False
    has_magnitude: bool = False
    dropout_rate: float = 0.0
    dot_tpl: Config[Dot] | None = sub_config_field(None)

    def setup(self) -> None:
        """Create the weights of the adapter and the wrapped product."""
        check_sizes(self, rank=self.rank)
        check_positive(self, alpha=self.alpha)
        for name, weight in self._adapter().items():
            self.create_variable(name, weight)
        self.create_child("dropout", Dropout.HParams.config(rate=self.dropout_rate))
        self.create_child("base", self.dot_tpl or Dot.HParams.config())

    def _adapter(self) -> dict[str, WeightHParams]:
        """Return the declarations of the weights of the adapter by name."""
        weight, num_group, num_in = self._split_weight()
        end = num_group + num_in
        group, ins, outs = slice(num_group), slice(num_group, end), slice(end, None)
        shape, axes = weight.shape, weight.axes
        lora_a = WeightHParams(
            (*shape[group], *shape[ins], self.rank),
            (*axes[group], *axes[ins], None),
            init=WeightInit.FanIn(),
            dtype=weight.dtype,
            fan_in_dims=tuple(range(num_group, end)),
            fan_out_dims=(end,),
            decays=True,
        )
        lora_b = WeightHParams(
            (*shape[group], self.rank, *shape[outs]),
            (*axes[group], None, *axes[outs]),
            init=WeightInit.Constant(0.0),
            dtype=weight.dtype,
            fan_in_dims=(num_group,),
            fan_out_dims=tuple(range(num_group + 1, len(shape) - num_in + 1)),
            parts=weight.parts,
            decays=True,
        )
        adapter = {"lora_a": lora_a, "lora_b": lora_b}
        if self.has_magnitude:
            adapter["lora_magnitude"] = WeightHParams(
                (*shape[group], *shape[outs]),
                (*axes[group], *axes[outs]),
                init=WeightInit.Constant(0.0),
                dtype=weight.dtype,
                decays=False,
            )
        return adapter

    def fprop(self, x: jax.Array, w: jax.Array) -> jax.Array:
        """Multiply `[..., in]` by `[in, out]` and add the adapter: `[..., out]`, same dtype.

        For a group of weights: `[group, tokens, in]` and `[group, in, out]` to
        `[group, tokens, out]`.
        """
        a = self.theta.lora_a.reshape(*w.shape[:-1], self.rank)
        b = self.theta.lora_b.reshape(*w.shape[:-2], self.rank, w.shape[-1])
        scale = lora_scale(self)
        product = self.base(x, w) + scale * ((self.dropout(x) @ a) @ b)
        if not self.has_magnitude:
            return product
        # As in the paper, the gradient takes the norms as constants.
        before, after = (column_norms(one, (-2,)) for one in (w, w + scale * (a @ b)))
        change = self.theta.lora_magnitude.reshape(before.shape).astype(before.dtype)
        factor = (lax.stop_gradient(before) + change) / lax.stop_gradient(after)
        return (product * factor[..., None, :]).astype(product.dtype)

    def grouped_arrays(self) -> dict[str, GroupedArray]:
        """Return the adapter and the arrays of the wrapped product, by name."""
        base = {f"base/{name}": array for name, array in self.base.grouped_arrays().items()}
        adapter = {
            name: GroupedArray(getattr(self.theta, name), weight.axes)
            for name, weight in self._adapter().items()
        }
        return {**adapter, **base}

    def grouped(
        self,
        rows: jax.Array,
        w: jax.Array,
        product: GroupedProduct,
        shards: Mapping[str, jax.Array],
    ) -> jax.Array:
        """Multiply sorted rows `[rows, in]` by the weights of their groups and add the adapters.

        Raises:
          ConfigError: Training with dropout, or DoRA.
        """
        expected = "False, since rows of experts without a capacity have no DoRA"
        require(not self.has_magnitude, self, "has_magnitude", self.has_magnitude, expected)
        is_supported = self.dropout_rate == 0.0 or not self.is_training
        expected = "0, since rows of experts without a capacity have no dropout"
        require(is_supported, self, "dropout_rate", self.dropout_rate, expected)
        of_base = {n.removeprefix("base/"): x for n, x in shards.items() if n.startswith("base/")}
        low_rank = product(product(rows, shards["lora_a"]), shards["lora_b"])
        return self.base.grouped(rows, w, product, of_base) + lora_scale(self) * low_rank

    def _split_weight(self) -> tuple[WeightHParams, int, int]:
        """Return (weight, number of group dimensions, number of contracted dimensions)."""
        weight = self.weight
        assert weight is not None  # The layer that has this `dot_tpl` sets it.
        ins, outs = weight.contracted_dims, weight.output_dims
        if ins != tuple(range(ins[0], ins[0] + len(ins))) or min(outs) < max(ins):
            raise ConfigError(
                "LoRA cannot adapt the weight",
                owner=self.path_name,
                field="shape",
                value=weight.shape,
                expected="dimensions in the order group, contracted, outputs",
                hint=f"Dimensions {ins} are contracted and {outs} are outputs.",
            )
        return weight, ins[0], len(ins)


def add_lora(
    config: Config,
    *,
    rank: int = 8,
    alpha: float = 16.0,
    dropout_rate: float = 0.0,
    rank_stabilized: bool = False,
    has_magnitude: bool = False,
    only: str = ".*",
) -> Config:
    """Return a copy of a model's config with an adapter for each weight that is multiplied.

    Args:
      config: Config that contains the layers to adapt, such as that of a model.
      rank: Inner size of the adapters.
      alpha: Strength of the adapters, which are multiplied by alpha / rank.
      dropout_rate: Dropout rate of the adapters' inputs in training.
      rank_stabilized: Multiply by alpha / √rank instead (rsLoRA).
      has_magnitude: Also learn the norms of the columns of the adapted weights (DoRA).
      only: Regular expression that must match the whole path of fields to a layer, such as
        `.*(query|value)_tpl`.

    Raises:
      ConfigError: No layer with products matches, or one has an adapter already.
    """

    def add_adapter(owner: Config) -> None:
        field = f"{target_of(owner).__qualname__}.dot_tpl"
        expected = "a layer without an adapter; exclude it by `only`, or merge_lora first"
        require(not is_lora(owner.dot_tpl), "add_lora", field, "LoraDot", expected)
        owner.dot_tpl = LoraDot.HParams.config(
            rank=rank,
            alpha=alpha,
            rank_stabilized=rank_stabilized,
            has_magnitude=has_magnitude,
            dropout_rate=dropout_rate,
            dot_tpl=owner.dot_tpl,
        )

    return edit_products(config, add_adapter, only=only)


def merge_lora(config: Config, variables: Any) -> Any:
    """Add every adapter to its weight: w + (alpha / rank) · a·b, with the norms of DoRA.

    Args:
      config: Config of the model with adapters.
      variables: Variables of that model, `{collection: …}` of nested dicts of arrays `[...]`.

    Returns:
      Variables of the model without adapters, with the same outputs up to rounding.

    Raises:
      ConfigError: The config or the variables have no adapters, or weights are in integers.
    """
    merged = flatten_dict(variables)
    for dot, adapter in lora_dots(config).items():
        if (*dot, "lora_a") not in merged:
            value = "/".join((*dot[1:], "lora_a"))
            raise ConfigError("the variables lack LoRA weights", value=value)
        names = [name for name in _WEIGHTS if (*dot, name) in merged]
        parts = {name: merged.pop((*dot, name)) for name in names}
        target = (*dot[:-1], weight_of_dot(dot[-1]))
        merged[target] = _add_adapter(merged[target], parts, adapter, owner="/".join(dot[1:]))
        # The wrapped product takes the place of the adapter.
        for path in [p for p in merged if p[1 : len(dot) + 1] == (*dot[1:], "base")]:
            merged[path[0], *dot[1:], *path[len(dot) + 1 :]] = merged.pop(path)
    return unflatten_dict(merged)


def remove_lora(config: Config, variables: Any) -> tuple[Config, Any]:
    """Return a model without adapters that computes the same.

    Args:
      config: Config of a layer or a model; it is not changed.
      variables: Variables of the model, `{collection: …}` of nested dicts of arrays `[...]`.

    Returns:
      (config, variables), with every adapter added to its weight. Weights that are stored in
      integers become floating, all of them. The arguments themselves if the config has no adapters.

    Raises:
      ConfigError: Weights of the adapters are missing.
    """
    if not any(map(is_lora, walk_configs(config))):
        return config, variables
    config, variables = dequantize_model(config, variables)
    return strip_lora(config), merge_lora(config, variables)


def zero_adapters(variables: Any) -> Any:
    """Return variables with adapters that change nothing, without a copy of the other weights."""
    flat = flatten_dict(variables)
    zeros = {p: jnp.zeros_like(x) for p, x in flat.items() if p[-1] in _WEIGHTS[1:]}
    return unflatten_dict(flat | zeros)


def strip_lora(config: Config) -> Config:
    """Return a copy of a config without adapters."""
    plain = copy_config(config)
    for owner in walk_configs(plain):
        if "dot_tpl" in field_names(owner) and is_lora(owner.dot_tpl):
            owner.dot_tpl = owner.dot_tpl.dot_tpl
    return plain


def lora_dots(config: Config) -> dict[Path, Config]:
    """Return the configs of all adapters by the path of their variables.

    A layer's path does not follow from that of its config, so the model is traced with a rank of
    its own for each config.

    Raises:
      ConfigError: The config has no adapters.
    """
    marked = copy_config(config)
    dots, marks = ([*filter(is_lora, walk_configs(one))] for one in (config, marked))
    require(bool(dots), None, "config", target_of(config).__qualname__, "a model with LoraDot")
    for rank, dot in enumerate(marks, 1):
        dot.rank = rank
    variables = flatten_dict(jax.eval_shape(build(marked).init, jax.random.key(0)))
    ranks = {path[:-1]: x.shape[-1] for path, x in variables.items() if path[-1] == "lora_a"}
    return {path: dots[rank - 1] for path, rank in ranks.items()}


def lora_scale(adapter: Any) -> float:
    """Return the factor of a·b, from the fields of a `LoraDot` or of its config."""
    divisor = math.sqrt(adapter.rank) if adapter.rank_stabilized else adapter.rank
    scale: float = adapter.alpha / divisor
    return scale


def column_norms(w: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """Return the Euclidean norms of the columns of a weight in float32.

    Args:
      w: Weight `[..., in..., out...]`.
      axes: Axes of the inputs.
    """
    return jnp.sqrt(jnp.sum(jnp.square(w.astype(jnp.float32)), axes))


def _add_adapter(
    w: jax.Array, parts: Mapping[str, jax.Array], adapter: Config, *, owner: str
) -> jax.Array:
    """Return the adapted weight, computed in float32 and cast to the dtype of w."""
    if not jnp.issubdtype(w.dtype, jnp.floating):
        raise ConfigError(
            "an adapter cannot be added to a weight in integers",
            owner=owner,
            field="dtype",
            value=w.dtype.name,
            hint="Use remove_lora, or dequantize_model first.",
        )
    a, b = (parts[name].astype(jnp.float32) for name in ("lora_a", "lora_b"))
    # Repeated layers and groups are leading dimensions of w, a and b.
    num_leading = a.ndim + b.ndim - 2 - w.ndim
    leading, rank = w.shape[:num_leading], a.shape[-1]
    outs = math.prod(b.shape[num_leading + 1 :])
    plain = w.astype(jnp.float32).reshape(*leading, -1, outs)
    product = a.reshape(*leading, -1, rank) @ b.reshape(*leading, rank, outs)
    merged = plain + lora_scale(adapter) * product
    if "lora_magnitude" in parts:
        before, after = (column_norms(one, (-2,)) for one in (plain, merged))
        change = parts["lora_magnitude"].astype(jnp.float32).reshape(before.shape)
        merged = merged * ((before + change) / after)[..., None, :]
    return merged.reshape(w.shape).astype(w.dtype)


def is_lora(value: Any) -> bool:
    """Return whether a value is the config of a `LoraDot`."""
    return is_config(value) and issubclass(target_of(value), LoraDot)
