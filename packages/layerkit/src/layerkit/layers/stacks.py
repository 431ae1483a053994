"""Stacks of Transformer layers: in a row, or as one scan over stacked weights.

Sizes are said once, on the stack or the model, and handed down. A stack repeats one layer
(`layer_tpl`) or a pattern of layers (`block_tpls`): layer i is block i % period, so five local
layers and a global one make the stack of Gemma 3, and a dense layer and a mixture of experts that
of GShard. `locate_layer` tells where the variables of a layer lie, whatever the stack.
"""

from __future__ import annotations

import inspect
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from layerkit.base_layer import CACHE, BaseLayer
from layerkit.checks import check_rates, check_same_shape, check_sizes
from layerkit.config import Config, is_config, sub_config_field, target_of
from layerkit.derived_fields import derive_fields
from layerkit.field_checks import Conditions
from layerkit.layers.attention.biases import add_relative_bias
from layerkit.layers.masks import AttentionMask, row_positions
from layerkit.layers.remat import check_remat_policy, remat
from layerkit.layers.repeat import Repeat
from layerkit.layers.transformer import Transformer, given


class StackedTransformer(BaseLayer):
    """`num_layers` layers in a row, each compiled on its own.

    Attributes:
      layer_tpl: The layer that is stacked.
      block_tpls: Instead of `layer_tpl`: layers of a pattern that is repeated over the depth, and
        need not come out even. None for the one layer.
      num_layers: How many.
      remat: Name of the rematerialisation policy around each layer; see `layerkit.layers.remat`.
      relative_bias_tpl: A bias of the attention logits by distance that all layers share (T5,
        ALiBi), computed once per call; None without.
      droppath_rate: Probability that training leaves a branch of an example out, in the last layer;
        it grows linearly, layer i of n (from 1) has i/n of it (Huang et al., 2016).
      Others: handed to every layer, so that the templates leave their sizes out or agree; where
        `num_kv_heads` and `dim_per_head` are None, they may set them.

    Raises:
      ValueError: sizes below one, an unknown policy, a rate outside [0, 1) or set here and on a
        layer, or both `layer_tpl` and `block_tpls`.
    """

    used_only_if: ClassVar[Conditions] = {"layer_tpl": "not block_tpls"}

    layer_tpl: Any = sub_config_field(Transformer.HParams)
    block_tpls: tuple[Any, ...] | None = sub_config_field(None)
    num_layers: int = 1
    input_dims: int = 0
    hidden_dims: int = 0
    num_heads: int = 0
    num_kv_heads: int | None = None
    dim_per_head: int | None = None
    remat: str = "none"
    relative_bias_tpl: Any = sub_config_field(None)
    droppath_rate: float = 0.0

    def setup(self) -> None:
        sizes = self._checked_sizes()
        if self.relative_bias_tpl is not None:
            self.create_child("relative_bias", self.relative_bias_tpl, num_heads=self.num_heads)
        self._create_layers(sizes)

    @nn.nowrap
    def _create_layers(self, sizes: dict[str, Any]) -> None:
        pattern = self.pattern
        templates = [pattern[layer % len(pattern)] for layer in range(self.num_layers)]
        self.create_children("layers", templates, **sizes)

    @property
    @nn.nowrap
    def pattern(self) -> tuple[Any, ...]:
        """The templates of the layers of one period."""
        return (self.layer_tpl,) if self.block_tpls is None else tuple(self.block_tpls)

    @nn.nowrap
    def locate_layer(self, layer: int) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """Where the variables of a layer lie in those of this stack.

        Args:
          layer: Counted from 0 at the input.

        Returns:
          The path of its subtree, and the indices into the leading axes of every leaf there: none
          for a layer whose weights are not stacked.

        Raises:
          IndexError: there is no such layer.
        """
        self._check_layer(layer)
        return (f"layers_{layer}",), ()

    def fprop(
        self,
        x: jax.Array,
        *,
        mask: AttentionMask,
        positions: jax.Array,
        bias: jax.Array | None = None,
        memory: jax.Array | None = None,
        memory_mask: AttentionMask | None = None,
        droppath_rates: jax.Array | None = None,
    ) -> jax.Array:
        """All layers on whole rows.

        Args:
          x: `[batch, length, dims]`.
          mask: Which position may attend which.
          positions: int32 `[batch, length]`, for a rotation.
          bias: float32 `[batch or 1, heads, length, length]`, added to the logits of attention.
          memory: `[batch, memory_length, memory_dims]`, for cross attention.
          memory_mask: Which position may attend which of the memory.
          droppath_rates: float32 `[num_layers]`, from an owner that repeats this stack; None for
            what `droppath_rate` says.

        Returns:
          The shape of `x`, in the compute dtype.
        """
        shared = given(
            mask=mask,
            positions=positions,
            bias=add_relative_bias(self, bias, *mask.distinct_positions()),
            memory=memory,
            memory_mask=memory_mask,
        )
        if droppath_rates is None and self.droppath_rate and self.is_training:
            depths = jnp.arange(1, self.num_layers + 1, dtype=jnp.float32)
            droppath_rates = self.droppath_rate / self.num_layers * depths
        return self._run_layers("__call__", self.cast(x), droppath_rates, shared)

    def init_cache(self, batch_size: int, max_length: int, memory: jax.Array | None = None) -> None:
        """Creates the empty caches of all layers.

        Args:
          batch_size: Rows.
          max_length: Tokens of a row.
          memory: `[batch, memory_length, memory_dims]`, whose keys and values are computed now.
        """
        if self.relative_bias_tpl is not None:
            # The bias of a step needs to know how many slots the caches of the layers have.
            self.put_variable(CACHE, "slots", row_positions(batch_size, max_length))
        self._init_layer_caches(batch_size, max_length, **given(memory=memory))

    def extend_step(
        self,
        x: jax.Array,
        *,
        time_step: jax.Array,
        positions: jax.Array,
        bias: jax.Array | None = None,
        memory_mask: AttentionMask | None = None,
        prefix_lengths: jax.Array | None = None,
    ) -> jax.Array:
        """All layers on the next positions of a cached sequence.

        Args:
          x: `[batch, t, dims]`.
          time_step: int32 scalar, how many tokens the cache holds.
          positions: int32 `[batch, t]`, for a rotation.
          bias: float32 `[batch or 1, heads, t, max_length]`, added to the logits of attention.
          memory_mask: Which of the t positions may attend which of the memory.
          prefix_lengths: int32 `[batch]`, how many tokens from the first on see one another, in a
            prefix language model; the first step must bring them all. None for none.

        Returns:
          The shape of `x`, in the compute dtype.
        """
        if self.relative_bias_tpl is not None:
            slots: jax.Array = self.get_variable(CACHE, "slots")
            queries = time_step + jnp.arange(x.shape[1], dtype=jnp.int32)[None]
            bias = add_relative_bias(self, bias, queries, slots[:1])
        shared = given(
            time_step=time_step,
            positions=positions,
            bias=bias,
            memory_mask=memory_mask,
            prefix_lengths=prefix_lengths,
        )
        return self._run_layers("extend_step", self.cast(x), None, shared)

    @nn.nowrap
    def _run_layers(
        self, method: str, x: jax.Array, rates: jax.Array | None, shared: dict[str, Any]
    ) -> jax.Array:
        """`method` of every layer in turn, with `shared` arguments and a droppath rate of each."""
        return self._run_row(self.layers, method, x, rates, shared)

    @nn.nowrap
    def _init_layer_caches(self, *args: Any, **kwargs: Any) -> None:
        for layer in self.layers:
            layer.init_cache(*args, **kwargs)

    @nn.nowrap
    def _run_row(
        self,
        layers: list[Any],
        method: str,
        x: jax.Array,
        rates: jax.Array | None,
        shared: dict[str, Any],
    ) -> jax.Array:
        def body(layer: Any, x: jax.Array, own: dict[str, jax.Array]) -> jax.Array:
            outputs = getattr(layer, method)(x, **own, **shared)
            check_same_shape(layer, x, outputs=outputs)
            return outputs

        # A stack cannot tell whether it is a period in the loop of another, and takes no risk.
        run = remat(body, self.remat, in_scan=False)
        for index, layer in enumerate(layers):
            x = run(layer, x, {} if rates is None else {"droppath_rate": rates[index]})
        return x

    @nn.nowrap
    def _checked_sizes(self) -> dict[str, Any]:
        """What every layer is given, after refusing what a stack of any kind cannot be."""
        check_sizes(self, num_layers=self.num_layers)
        check_remat_policy(self.remat, owner=self.path_name, sharding=self.inherited("sharding"))
        check_rates(self, droppath_rate=self.droppath_rate)
        of_layers = [getattr(template, "droppath_rate", 0.0) for template in self.pattern]
        for template in self.pattern if self.droppath_rate else ():
            self._check_takes_droppath(template)
        if self.droppath_rate and any(of_layers):
            raise ValueError(
                f"{self.path_name}: droppath_rate={self.droppath_rate} gives each layer a rate of"
                f" its own, but its template sets droppath_rate={max(of_layers)}; set one of the"
                " two"
            )
        if self.block_tpls is not None and not self.block_tpls:
            raise ValueError(f"{self.path_name}: block_tpls is empty, expected layers, or None")
        return {
            "input_dims": self.input_dims,
            "hidden_dims": self.hidden_dims,
            "num_heads": self.num_heads,
            "num_kv_heads": self.num_kv_heads,
            "dim_per_head": self.dim_per_head,
        }

    @nn.nowrap
    def _check_takes_droppath(self, template: Any) -> None:
        """Refuses a layer that training could not tell its rate."""
        layer = target_of(template) if is_config(template) else None
        if layer is None or not hasattr(layer, "fprop"):
            return  # no layer, which is refused where it is made
        parameters = inspect.signature(layer.fprop).parameters.values()
        if not any(p.name == "droppath_rate" or p.kind is p.VAR_KEYWORD for p in parameters):
            raise ValueError(
                f"{self.path_name}: droppath_rate={self.droppath_rate} gives each layer a rate of"
                f" its own, but {layer.__qualname__}.fprop takes no droppath_rate; let it take one,"
                " as Transformer.fprop does, or leave the field out"
            )

    @nn.nowrap
    def _check_layer(self, layer: int) -> None:
        if not 0 <= layer < self.num_layers:
            raise IndexError(
                f"{self.path_name}: no layer {layer}; there are {self.num_layers}, counted from 0"
            )


class StackedTransformerRepeated(StackedTransformer):
    """The same stack as one scan: weights stacked on a `layers` axis, compiled once.

    With a pattern the scan goes over whole periods, and the layers that remain follow in a row.

    Attributes:
      unroll: How many layers, or periods, one iteration of the loop holds.
      stacked_shape: Sizes of several axes to stack the weights on, the outermost first, whose
        product is the number of layers, or periods; None for one axis. See `Repeat.num_repeats`.
    """

    unroll: int = 1
    stacked_shape: tuple[int, ...] | None = None

    @nn.nowrap
    def _create_layers(self, sizes: dict[str, Any]) -> None:
        blocks, shape = self._filled_pattern(sizes), self._checked_shape()
        repeat: Config = Repeat.HParams.config(num_repeats=shape, unroll=self.unroll)
        if len(blocks) == 1:
            repeat.set(sub_tpl=blocks[0], remat=self.remat)
        else:
            # A period is a short stack of its own, whose layers are rematerialised one by one.
            repeat.sub_tpl = StackedTransformer.HParams.config(
                block_tpls=blocks, num_layers=len(blocks), remat=self.remat, **sizes
            )
        if self._num_periods:
            self.create_child("repeat", repeat)
        self.create_children("remainder", blocks[: self.num_layers % len(blocks)])

    @property
    @nn.nowrap
    def _num_periods(self) -> int:
        return self.num_layers // len(self.pattern)

    @nn.nowrap
    def locate_layer(self, layer: int) -> tuple[tuple[str, ...], tuple[int, ...]]:
        self._check_layer(layer)
        period, block = divmod(layer, len(self.pattern))
        if period == self._num_periods:
            return (f"remainder_{block}",), ()
        indices = np.unravel_index(period, self._checked_shape())
        place = () if len(self.pattern) == 1 else (f"layers_{block}",)
        return ("repeat", "sub", *place), tuple(int(index) for index in indices)

    @nn.nowrap
    def _run_layers(
        self, method: str, x: jax.Array, rates: jax.Array | None, shared: dict[str, Any]
    ) -> jax.Array:
        blocks, periods = len(self.pattern), self._num_periods
        looped = blocks * periods
        if periods:
            each = {}
            if rates is not None and blocks == 1:
                each = {"droppath_rate": rates}
            elif rates is not None:
                each = {"droppath_rates": rates[:looped].reshape(periods, blocks)}
            x = self.repeat.run(method, x, each=each, **shared)
        return self._run_row(
            self.remainder, method, x, None if rates is None else rates[looped:], shared
        )

    @nn.nowrap
    def _init_layer_caches(self, *args: Any, **kwargs: Any) -> None:
        if self._num_periods:
            self.repeat.init_cache(*args, **kwargs)
        for layer in self.remainder:
            layer.init_cache(*args, **kwargs)

    @nn.nowrap
    def _filled_pattern(self, sizes: dict[str, Any]) -> tuple[Config, ...]:
        """The templates of a period with their sizes, refusing one that copies cannot have."""
        if self.block_tpls is None:
            return (derive_fields(self.layer_tpl, f"{self.path_name}.layer_tpl", **sizes),)
        filled = []
        for index, template in enumerate(self.block_tpls):
            where = f"{self.path_name}.block_tpls[{index}]"
            filled.append(derive_fields(template, where, **sizes))
            if template.shared_weight_id is not None:
                raise ValueError(
                    f"{where}: every period has weights of its own; unset"
                    f" shared_weight_id={template.shared_weight_id!r}, or use StackedTransformer"
                )
        return tuple(filled)

    @nn.nowrap
    def _checked_shape(self) -> tuple[int, ...]:
        if self.stacked_shape is None:
            return (self._num_periods,)
        if math.prod(self.stacked_shape) != self._num_periods:
            raise ValueError(
                f"{self.path_name}: stacked_shape={self.stacked_shape} holds"
                f" {math.prod(self.stacked_shape)} layers or periods, but there are"
                f" {self._num_periods}"
            )
        return tuple(self.stacked_shape)
