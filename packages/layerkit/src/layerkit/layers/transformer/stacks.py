"""Stacks of Transformer layers: in sequence, or as a scan over stacked weights.

Set sizes once, on the stack or the model; the layers inherit them. A stack repeats one layer
(`layer_tpl`) or a pattern of layers (`block_tpls`). With a pattern of n blocks, layer i has the
template `block_tpls[i % n]`. One repetition of the pattern is called a period. Gemma 3 repeats five
layers with local attention and one with global attention. GShard repeats a dense layer and a
mixture of experts. Other layers may come first (`first_tpls`), as the dense layers of DeepSeek V3.
`locate_layer` locates a layer's variables in either kind of stack.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from layerkit.base.base_layer import CACHE, BaseLayer
from layerkit.base.weights import shared_ids
from layerkit.config import Config, assigned_fields, field_names, sub_config_field
from layerkit.config.checks import check_rates, check_same_shape, check_sizes, require
from layerkit.config.hparams import Conditions, derive_fields
from layerkit.layers.attention.multi_head import KeysValues
from layerkit.layers.transformer.repeat import Repeat, check_not_shared
from layerkit.layers.transformer.transformer import Transformer, drop_none
from layerkit.ops.attention.distance_bias import LogitBias
from layerkit.ops.attention.masks import AttentionMask, row_positions
from layerkit.ops.remat import check_remat_policy, remat


class StackedTransformer(BaseLayer):
    """A sequence of `num_layers` layers, each compiled separately.

    The layers inherit the sizes of the stack. A template must leave a size out or set the same
    value. It may set `hidden_dims` and `num_heads` if these are 0 on the stack, and `num_kv_heads`
    and `dim_per_head` if these are None.

    Attributes:
      layer_tpl: Layer that is repeated `num_layers` times.
      block_tpls: Layers of one period, to repeat a pattern instead of `layer_tpl`. The last period
        may be incomplete. None to repeat `layer_tpl`.
      first_tpls: Layers before those that are repeated, which run in sequence; None for none.
      num_layers: Number of layers, including those of `first_tpls`.
      remat: Name of the rematerialization policy of each layer; see `layerkit.ops.remat`.
      relative_bias_tpl: Bias of the attention logits that depends on the distance (T5, ALiBi). It
        is computed once per call and shared by all layers. None for no bias.
      droppath_rate: Probability that training drops a residual branch of an example in the last
        layer. Layer i of n, counted from 1, has the rate droppath_rate·i/n (Huang et al., 2016).

    Raises:
      ConfigError: A size is below one, the policy is unknown, `droppath_rate` is outside [0, 1) or
        also set on a layer, or `layer_tpl` and `block_tpls` are both set.
    """

    used_only_if: ClassVar[Conditions] = {"layer_tpl": "not block_tpls"}

    layer_tpl: Config[BaseLayer] = sub_config_field(Transformer.HParams)
    block_tpls: tuple[Config[BaseLayer], ...] | None = sub_config_field(None)
    first_tpls: tuple[Config[BaseLayer], ...] | None = sub_config_field(None)
    num_layers: int = 1
    input_dims: int = 0
    hidden_dims: int = 0
    num_heads: int = 0
    num_kv_heads: int | None = None
    dim_per_head: int | None = None
    remat: str = "none"
    relative_bias_tpl: Config[BaseLayer] | None = sub_config_field(None)
    droppath_rate: float = 0.0

    def setup(self) -> None:
        """Check the fields and create the layers."""
        sizes = self._checked_sizes()
        if self.relative_bias_tpl is not None:
            self.create_child("relative_bias", self.relative_bias_tpl, num_heads=self.num_heads)
        first = self.first_tpls or ()
        for index, template in enumerate(first):
            check_not_shared(self.path_name, f"first_tpls[{index}]", template)
        self.create_children("first", first, **sizes)
        self._create_layers(sizes)

    def _create_layers(self, sizes: dict[str, Any]) -> None:
        pattern = self.pattern
        # Layers read shared weights from the first one, which rematerialization does not pass on.
        is_valid = self.remat == "none" or self._num_repeated == 1 or not shared_ids(pattern)
        expected = "'none' for layers that share weights (shared_weight_id)"
        require(is_valid, self, "remat", self.remat, expected)
        templates = [pattern[layer % len(pattern)] for layer in range(self._num_repeated)]
        self.create_children("layers", templates, **sizes)

    @property
    def pattern(self) -> tuple[Any, ...]:
        """Templates of the layers of one period."""
        return (self.layer_tpl,) if self.block_tpls is None else tuple(self.block_tpls)

    @property
    def _num_first(self) -> int:
        return len(self.first_tpls or ())

    @property
    def _num_repeated(self) -> int:
        return self.num_layers - self._num_first

    @nn.nowrap
    def locate_layer(self, layer: int) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """Return the location of a layer's variables within the variables of the stack.

        Args:
          layer: Index of the layer, counted from 0 at the input.

        Returns:
          (path of the subtree, indices into the leading axes of its leaves). There are no indices
          if the weights of the layer are not stacked.
        """
        if layer < self._num_first:
            return (f"first_{layer}",), ()
        return self._locate_repeated(layer - self._num_first)

    def _locate_repeated(self, layer: int) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """Return the location of one of the layers after those of `first_tpls`, from 0."""
        return (f"layers_{layer}",), ()

    def fprop(
        self,
        x: jax.Array,
        *,
        mask: AttentionMask,
        positions: jax.Array,
        bias: LogitBias | None = None,
        memory: jax.Array | None = None,
        memory_mask: AttentionMask | None = None,
        droppath_rates: jax.Array | None = None,
        layer_inputs: jax.Array | None = None,
        kv: KeysValues | None = None,
    ) -> jax.Array:
        """Apply all layers to whole rows `[batch, length, dims]`; see `Transformer.fprop`.

        A stack that repeats this one passes `droppath_rates` float32 `[num_layers]`, one per layer;
        None computes them from the field `droppath_rate`. It passes `kv` of the layers before.
        `layer_inputs` `[num_layers, batch, length, layer_dims]` are for layers that read them.
        """
        if self.relative_bias_tpl is not None:
            from layerkit.layers.attention.biases import add_bias_of_rows

            bias = add_bias_of_rows(self.relative_bias, bias, mask)
        shared = drop_none(
            mask=mask,
            positions=positions,
            bias=bias,
            memory=memory,
            memory_mask=memory_mask,
            kv=kv,
        )
        if droppath_rates is None and self.droppath_rate and self.is_training:
            depths = jnp.arange(1, self.num_layers + 1, dtype=jnp.float32)
            droppath_rates = self.droppath_rate / self.num_layers * depths
        differing = drop_none(droppath_rate=droppath_rates, layer_input=layer_inputs)
        return self._run_all("__call__", self.cast(x), differing, shared)

    def init_cache(self, batch_size: int, max_length: int, memory: jax.Array | None = None) -> None:
        """Create empty caches; `memory` `[batch, memory_length, memory_dims]` as in the layers."""
        if self.relative_bias_tpl is not None:
            # `extend_step` needs the number of slots of the layers' caches to compute the bias.
            self.put_variable(CACHE, "slots", row_positions(batch_size, max_length))
        for layer in self.first:
            layer.init_cache(batch_size, max_length, **drop_none(memory=memory))
        self._init_layer_caches(batch_size, max_length, **drop_none(memory=memory))

    def extend_step(
        self,
        x: jax.Array,
        *,
        time_step: jax.Array,
        positions: jax.Array,
        bias: jax.Array | None = None,
        memory_mask: AttentionMask | None = None,
        query_ends: jax.Array | None = None,
        layer_inputs: jax.Array | None = None,
        kv: KeysValues | None = None,
    ) -> jax.Array:
        """Apply all layers to the next `[batch, t, dims]`, as `Transformer.extend_step`."""
        if self.relative_bias_tpl is not None:
            slots: jax.Array = self.get_variable(CACHE, "slots")
            queries = time_step + jnp.arange(x.shape[1], dtype=jnp.int32)[None]
            relative = self.relative_bias(queries, slots[:1])
            bias = relative if bias is None else relative + bias
        shared = drop_none(
            time_step=time_step,
            positions=positions,
            bias=bias,
            memory_mask=memory_mask,
            query_ends=query_ends,
            kv=kv,
        )
        differing = drop_none(layer_input=layer_inputs)
        return self._run_all("extend_step", self.cast(x), differing, shared)

    def _run_all(
        self, method: str, x: jax.Array, differing: dict[str, jax.Array], shared: dict[str, Any]
    ) -> jax.Array:
        """Call `method` on each layer with the `shared` arguments and its part of the `differing`.

        The first axis of `differing`, such as the droppath rates, is that of the layers.
        """
        templates = (*(self.first_tpls or ()), *self.pattern)
        attentions = [getattr(template, "attention_tpl", None) for template in templates]
        read = {getattr(attention, "kv_layer", None) for attention in attentions} - {None}
        if read and "kv" not in shared:
            shared = {**shared, "kv": {}}
        first = {name: values[: self._num_first] for name, values in differing.items()}
        rest = {name: values[self._num_first :] for name, values in differing.items()}
        x = self._run_in_sequence(self.first, method, x, first, shared, read=read)
        return self._run_layers(method, x, rest, shared)

    def _run_layers(
        self, method: str, x: jax.Array, differing: dict[str, jax.Array], shared: dict[str, Any]
    ) -> jax.Array:
        """Call `method` on each layer after those of `first_tpls`, as `_run_all`."""
        return self._run_in_sequence(self.layers, method, x, differing, shared)

    def _init_layer_caches(self, *args: Any, **kwargs: Any) -> None:
        for layer in self.layers:
            layer.init_cache(*args, **kwargs)

    def _run_in_sequence(
        self,
        layers: list[Any],
        method: str,
        x: jax.Array,
        differing: dict[str, jax.Array],
        shared: dict[str, Any],
        *,
        read: Collection[int | None] = (),
    ) -> jax.Array:
        """Call `method` on each of some layers; keep keys and values of the numbers in `read`."""

        def body(layer: Any, x: jax.Array, values: Any, kv: KeysValues) -> tuple[jax.Array, Any]:
            # A layer adds its keys and values to its copy, since they are results of this function.
            kept = dict(kv)
            arguments = {**shared, **values} | ({"kv": kept} if "kv" in shared else {})
            outputs = getattr(layer, method)(x, **arguments)
            check_same_shape(layer, x, outputs=outputs)
            return outputs, kept.get(None)

        # This stack may be a period in the scan of another or run outside of a scan. Only
        # in_scan=False is valid for both.
        run = remat(body, self.remat, in_scan=False)
        for index, layer in enumerate(layers):
            layer_values = {name: values[index] for name, values in differing.items()}
            x, pair = run(layer, x, layer_values, shared.get("kv", {}))
            if index + 1 in read:
                shared["kv"][index + 1] = pair
        return x

    def _checked_sizes(self) -> dict[str, Any]:
        """Check the fields and return the sizes of every layer."""
        check_sizes(self, num_layers=self.num_layers)
        check_remat_policy(self.remat, owner=self.path_name)
        check_rates(self, droppath_rate=self.droppath_rate)
        is_valid = self.block_tpls is None or bool(self.block_tpls)
        require(is_valid, self, "block_tpls", self.block_tpls, "at least one layer, or None")
        expected = f"fewer than num_layers={self.num_layers} layers"
        require(self._num_repeated > 0, self, "first_tpls", self.first_tpls, expected)
        return {
            "input_dims": self.input_dims,
            "hidden_dims": self.hidden_dims or None,
            "num_heads": self.num_heads or None,
            "num_kv_heads": self.num_kv_heads,
            "dim_per_head": self.dim_per_head,
        }


def unrolled_stack(stack: Config) -> Config:
    """Return the config of a `StackedTransformer` with the layers of a repeated stack.

    Args:
      stack: Config of a subclass, whose fields for the repetition are left out.
    """
    kept = set(field_names(StackedTransformer))
    fields = {name: value for name, value in assigned_fields(stack).items() if name in kept}
    return StackedTransformer.HParams.config(**fields)


class StackedTransformerRepeated(StackedTransformer):
    """A stack that scans over weights stacked on a `layers` axis, so the layer is compiled once.

    With a pattern, each iteration of the scan runs a period. The layers of an incomplete last
    period run in sequence after the scan.

    Attributes:
      unroll: Number of layers, or of periods with a pattern, in one iteration of the loop; None
        for the default of `Repeat` and, in decoding, of `layerkit.decoding.cached_network`.
      stacked_shape: Sizes of the axes on which the weights are stacked, outermost first. Their
        product is the number of layers, or of whole periods with a pattern. None for a single
        axis. See `Repeat.num_repeats`.
    """

    unroll: int | None = None
    stacked_shape: tuple[int, ...] | None = None

    def _create_layers(self, sizes: dict[str, Any]) -> None:
        blocks, shape = self._sized_pattern(sizes), self._checked_shape()
        repeat: Config = Repeat.HParams.config(num_repeats=shape, unroll=self.unroll)
        if len(blocks) == 1:
            repeat.set(sub_tpl=blocks[0], remat=self.remat)
        else:
            # A period is a stack whose layers are rematerialized one by one.
            repeat.sub_tpl = StackedTransformer.HParams.config(
                block_tpls=blocks,
                num_layers=len(blocks),
                remat=self.remat,
                **drop_none(**sizes),
            )
        if self._num_periods:
            self.create_child("repeat", repeat)
        self.create_children("remainder", blocks[: self._num_repeated % len(blocks)])

    @property
    def _num_periods(self) -> int:
        return self._num_repeated // len(self.pattern)

    def _locate_repeated(self, layer: int) -> tuple[tuple[str, ...], tuple[int, ...]]:
        period, block = divmod(layer, len(self.pattern))
        if period == self._num_periods:
            return (f"remainder_{block}",), ()
        indices = np.unravel_index(period, self._checked_shape())
        place = () if len(self.pattern) == 1 else (f"layers_{block}",)
        return ("repeat", "sub", *place), tuple(int(index) for index in indices)

    def _run_layers(
        self, method: str, x: jax.Array, differing: dict[str, jax.Array], shared: dict[str, Any]
    ) -> jax.Array:
        blocks, periods = len(self.pattern), self._num_periods
        looped = blocks * periods
        if periods:
            per_copy = differing
            if blocks > 1:
                per_copy = {
                    f"{name}s": values[:looped].reshape(periods, blocks, *values.shape[1:])
                    for name, values in differing.items()
                }
            x = self.repeat.run(method, x, per_copy=per_copy, **shared)
        rest = {name: values[looped:] for name, values in differing.items()}
        return self._run_in_sequence(self.remainder, method, x, rest, shared)

    def _init_layer_caches(self, *args: Any, **kwargs: Any) -> None:
        if self._num_periods:
            self.repeat.init_cache(*args, **kwargs)
        for layer in self.remainder:
            layer.init_cache(*args, **kwargs)

    def _sized_pattern(self, sizes: dict[str, Any]) -> tuple[Config, ...]:
        """Return the templates of a period, with the sizes of the stack filled in."""
        if self.block_tpls is None:
            return (derive_fields(self.layer_tpl, f"{self.path_name}.layer_tpl", **sizes),)
        sized = []
        for index, template in enumerate(self.block_tpls):
            field = f"block_tpls[{index}]"
            sized.append(derive_fields(template, f"{self.path_name}.{field}", **sizes))
            check_not_shared(self.path_name, field, template)
        return tuple(sized)

    def _checked_shape(self) -> tuple[int, ...]:
        if self.stacked_shape is None:
            return (self._num_periods,)
        is_valid = math.prod(self.stacked_shape) == self._num_periods
        expected = f"sizes with the product {self._num_periods}, the number of layers or periods"
        require(is_valid, self, "stacked_shape", self.stacked_shape, expected)
        return tuple(self.stacked_shape)
