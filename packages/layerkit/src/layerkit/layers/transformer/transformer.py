"""A Transformer layer: attention, optional cross attention, and feed-forward.

Each of them is a branch f with a residual; `norm_policy` is the placement of the norms:

| policy | | models |
|---|---|---|
| `pre` | x + f(norm(x)) | GPT-2, Llama (Xiong et al., 2020, arXiv:2002.04745) |
| `post` | norm(x + f(x)) | the Transformer of 2017, BERT |
| `pre_post` | x + post_norm(f(norm(x))) | Gemma 2 and 3 |
| `branch` | x + post_norm(f(x)) | OLMo 2 |

Branches run in sequence or, with `parallel`, on the same input (GPT-J, PaLM):

    x = x + attention(attention_norm(x)) + feed_forward(feed_forward_norm(x))

`extend_step` computes the same as `fprop` for the next positions of a cached sequence.

Sequence parallelism splits norms and residuals by position over the mesh axis `tensor` (Korthikanti
et al., 2022, arXiv:2205.05198). Products with weights need whole rows, of which each device
computes some heads or hidden units. The all-reduce of their outputs becomes a reduce-scatter, and
an all-gather precedes the next products. Together they send as much. The rule of `residual_length`
selects it: `DEFAULT_RULES.replace(residual_length=("context", "tensor"))`. By default it equals the
rule of `length`, and `gather_positions` and `split_positions` do nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Literal

import jax

from layerkit.base.base_layer import BaseLayer
from layerkit.base.sharding import BoundSharding
from layerkit.base.weights import WeightHParams, WeightInit
from layerkit.config import Config, fields_of, sub_config_field
from layerkit.config.checks import check_same_shape, require
from layerkit.config.hparams import Conditions
from layerkit.layers.attention.multi_head import KeysValues, MultiHeadAttention
from layerkit.layers.basic.dots import constrain_tokens, merge_tokens
from layerkit.layers.basic.elementwise import BaseActivation, Dropout, ReLU, StochasticResidual
from layerkit.layers.basic.linears import Bias, Linear
from layerkit.layers.basic.normalizations import BaseNormalization, LayerNorm
from layerkit.ops.attention.distance_bias import LogitBias
from layerkit.ops.attention.masks import AttentionMask
from layerkit.ops.remat import name_activation

# Layouts of a residual, and of the inputs of products with weights.
_RESIDUAL = ("batch", "residual_length", "act_embed")
_WHOLE = ("batch", "length", "act_embed")

NormPolicy = Literal["pre", "post", "pre_post", "branch"]

_Branches = dict[str, Callable[[jax.Array], jax.Array]]


class TransformerFeedForward(BaseLayer):
    """A feed-forward block: `[batch, length, dims]` → the same shape.

        down(activation(up(x)))             without a gate
        down(activation(gate(x)) · up(x))   with a gate

    With a gate (Shazeer, 2020, arXiv:2002.05202) the activation selects the variant: SiLU is
    SwiGLU, GELU is GEGLU, ReLU is ReGLU, Sigmoid is GLU, Identity is bilinear.

    Attributes:
      input_dims: Size of the model dimension.
      hidden_dims: Size of the hidden dimension.
      has_bias: True to add a bias after each projection, including the gate's.
      use_gate: True to multiply the hidden activations by a gate.
      gate_multiplier: Factor of the gate before its activation (Falcon-H1).
      activation_tpl: Activation.
      dropout_rate: Dropout rate of the hidden activations in training.
      linear_tpl: Projections.
      bias_tpl: Biases.
      down_init: Initializer of the `down` projection; None for that of the others.
    """

    used_only_if: ClassVar[Conditions] = {"bias_tpl": "has_bias", "gate_multiplier": "use_gate"}

    input_dims: int = 0
    hidden_dims: int = 0
    has_bias: bool = False
    use_gate: bool = False
    gate_multiplier: float = 1.0
    linear_tpl: Config[BaseLayer] = sub_config_field(Linear.HParams)
    bias_tpl: Config[BaseLayer] = sub_config_field(Bias.HParams)
    activation_tpl: Config[BaseActivation] = sub_config_field(ReLU.HParams)
    dropout_rate: float = 0.0
    down_init: WeightInit | None = None

    def setup(self) -> None:
        """Create the projections, biases, activation and dropout."""
        wide = {"input_dims": self.input_dims, "output_dims": self.hidden_dims}
        widening = ("up", "gate") if self.use_gate else ("up",)
        for name in widening:
            self.create_child(name, self.linear_tpl, **wide, weight_axes=("embed", "mlp"))
            if self.has_bias:
                bias = {"dims": self.hidden_dims, "axes": ("mlp",)}
                self.create_child(f"{name}_bias", self.bias_tpl, **bias)
        down_tpl = self.linear_tpl
        if self.down_init is not None:
            down_tpl = down_tpl.clone(weight_init=self.down_init)
        self.create_child(
            "down",
            down_tpl,
            input_dims=self.hidden_dims,
            output_dims=self.input_dims,
            weight_axes=("mlp", "embed"),
        )
        if self.has_bias:
            self.create_child("down_bias", self.bias_tpl, dims=self.input_dims, axes=("embed",))
        self.create_child("activation", self.activation_tpl)
        self.create_child("dropout", Dropout.HParams.config(rate=self.dropout_rate))

    def fprop(self, x: jax.Array, *, is_token: jax.Array | None = None) -> jax.Array:
        """Map `[batch, length, input_dims]` to the same shape.

        Args:
          x: Activations `[batch, length, input_dims]`.
          is_token: bool `[batch, length]`, False for padding. It has no effect here, since every
            position is computed separately. Layers in which positions share something, such as the
            capacity of experts, exclude padding.
        """
        del is_token
        tokens = merge_tokens(self, x)
        hidden = self._widen("up", tokens)
        if self.use_gate:
            gate = self._widen("gate", tokens)
            if self.gate_multiplier != 1.0:
                gate = gate * self.gate_multiplier
            hidden = self.activation.gate(gate, hidden)
        else:
            hidden = self.activation(hidden)
        hidden = name_activation(hidden, "feed_forward_hidden")
        output = self.down(self.dropout(hidden))
        if self.has_bias:
            output = self.down_bias(output)
        return output.reshape(x.shape)

    def _widen(self, name: str, tokens: jax.Array) -> jax.Array:
        wide = constrain_tokens(self, getattr(self, name)(tokens), "act_mlp")
        return getattr(self, f"{name}_bias")(wide) if self.has_bias else wide


class Transformer(BaseLayer):
    """A Transformer layer: `[batch, length, dims]` → the same shape.

    Attributes:
      input_dims: Size of the model dimension.
      hidden_dims: Size of the hidden dimension of the feed-forward block.
      num_heads: Number of query heads.
      num_kv_heads: Number of key and value heads; None for the number of query heads.
      dim_per_head: Size of a head; None for input_dims / num_heads.
      norm_tpl: Template of all norms.
      feed_forward_norm_tpl: Template of the norms of the feed-forward block; None for `norm_tpl`.
      norm_policy: Placement of the norms: `pre`, `post`, `pre_post` or `branch`; see the module.
      parallel: True if all branches read the input of the layer; False if each reads the output of
        the previous one.
      parallel_shares_norm: True for one norm before all parallel branches (GPT-J, PaLM); False for
        one norm for each (GPT-NeoX).
      attention_tpl: Self-attention, or another mixer of tokens with the same methods, such as a
        `TokenMixer`. It gets the sizes above that it has fields for. None for none (Nemotron-H).
      cross_attention_tpl: Attention of a decoder to a memory, after self-attention; None for no
        cross attention.
      allow_skip_cross_attention: True to leave out cross attention where there is no memory, as
        for examples without a source; False to raise an error.
      feed_forward_tpl: Feed-forward block, dense or a mixture of experts; None for none (Mamba).
      residual_weight: Factor of the output of each branch in its residual sum (Granite).
      feed_forward_residual_weight: Further factor of the output of the feed-forward block; 0.5 in
        the two half steps of a Conformer (Gulati et al., 2020, arXiv:2005.08100).
      layer_input_tpl: Branch after the feed-forward block that reads the layer's vectors of the
        tokens, such as `GatedInput`; None for none.
      has_output_scale: True to multiply the output of the layer by the state `output_scale` `[1]`,
        which starts at 1 and which the optimizer does not train (Gemma 4).
      dropout_rate: Dropout rate of the outputs of branches in training.
      input_dropout_rate: Dropout rate of the input of the layer, and so of the residual, in
        training.
      droppath_rate: Probability that training drops a branch of an example; see
        `StochasticResidual`.

    Raises:
      ConfigError: An unknown `norm_policy`, or an unsupported combination of fields.
    """

    used_only_if: ClassVar[Conditions] = {
        "parallel_shares_norm": ("parallel", "attention_tpl"),
        "allow_skip_cross_attention": "cross_attention_tpl",
        "feed_forward_norm_tpl": ("not parallel_shares_norm", "feed_forward_tpl"),
        "feed_forward_residual_weight": "feed_forward_tpl",
    }

    input_dims: int = 0
    hidden_dims: int = 0
    num_heads: int = 0
    num_kv_heads: int | None = None
    dim_per_head: int | None = None
    norm_tpl: Config[BaseNormalization] = sub_config_field(LayerNorm.HParams)
    feed_forward_norm_tpl: Config[BaseNormalization] | None = sub_config_field(None)
    norm_policy: NormPolicy = "pre"
    parallel: bool = False
    parallel_shares_norm: bool = False
    attention_tpl: Config[BaseLayer] | None = sub_config_field(MultiHeadAttention.HParams)
    cross_attention_tpl: Config[BaseLayer] | None = sub_config_field(None)
    allow_skip_cross_attention: bool = False
    feed_forward_tpl: Config[BaseLayer] | None = sub_config_field(TransformerFeedForward.HParams)
    residual_weight: float = 1.0
    feed_forward_residual_weight: float = 1.0
    layer_input_tpl: Config[BaseLayer] | None = sub_config_field(None)
    has_output_scale: bool = False
    dropout_rate: float = 0.0
    input_dropout_rate: float = 0.0
    droppath_rate: float = 0.0

    def setup(self) -> None:
        """Create the branches and their norms."""
        self._check_fields()
        heads = {
            "input_dims": self.input_dims,
            "num_heads": self.num_heads,
            "num_kv_heads": self.num_kv_heads,
            "dim_per_head": self.dim_per_head,
        }
        wide = {"input_dims": self.input_dims, "hidden_dims": self.hidden_dims}
        for name, sizes in (
            ("attention", heads),
            ("cross_attention", heads),
            ("feed_forward", wide),
        ):
            if (template := getattr(self, f"{name}_tpl")) is not None:
                self._create_branch(name, template, **sizes)
        if self.layer_input_tpl is not None:
            self.create_child("layer_input", self.layer_input_tpl, input_dims=self.input_dims)
        if self.has_output_scale:
            one = WeightHParams((1,), (None,), init=WeightInit.Constant(1.0))
            self.create_variable("output_scale", one, trainable=False)
        self.create_child("dropout", Dropout.HParams.config(rate=self.dropout_rate))
        input_dropout = Dropout.HParams.config(rate=self.input_dropout_rate)
        self.create_child("input_dropout", input_dropout)
        self.create_child("residual", StochasticResidual.HParams.config(rate=self.droppath_rate))

    def _create_branch(self, name: str, template: Any, **sizes: Any) -> None:
        shares_norm = self.parallel_shares_norm and name != "attention"
        norm_tpl = self.feed_forward_norm_tpl if name.startswith("feed_forward") else None
        norm_tpl = self.norm_tpl if norm_tpl is None else norm_tpl
        if self.norm_policy != "branch" and not shares_norm:
            self.create_child(f"{name}_norm", norm_tpl, dims=self.input_dims)
        self.create_child(name, template, **fields_of(template, **sizes))
        if self.norm_policy in ("pre_post", "branch"):
            self.create_child(f"{name}_post_norm", norm_tpl, dims=self.input_dims)

    def fprop(
        self,
        x: jax.Array,
        *,
        mask: AttentionMask,
        positions: jax.Array,
        bias: LogitBias | None = None,
        memory: jax.Array | None = None,
        memory_mask: AttentionMask | None = None,
        droppath_rate: jax.Array | None = None,
        layer_input: jax.Array | None = None,
        kv: KeysValues | None = None,
    ) -> jax.Array:
        """Apply the layer to whole rows.

        Args:
          x: `[batch, length, dims]`.
          mask: Mask of self-attention.
          positions: int32 `[batch, length]`, for rotary embeddings.
          bias: float32 `[batch or 1, heads, length, length]`, or a bias by distance, added to the
            attention logits.
          memory: `[batch, memory_length, memory_dims]`, for cross attention.
          memory_mask: Mask of cross attention.
          droppath_rate: float32 scalar that replaces the field, from a stack whose rates differ.
          layer_input: `[batch, length, layer_dims]`, for `layer_input_tpl`.
          kv: Keys and values of other layers; see `MultiHeadAttention.fprop`.

        Returns:
          `[batch, length, dims]` in the compute dtype.

        Raises:
          ConfigError: Cross attention lacks memory or mask, or these are given without it.
        """
        self._check_memory(memory=memory, memory_mask=memory_mask)
        is_valid = droppath_rate is None or not self.droppath_rate
        expected = "0, since the stack sets the rate of each layer"
        require(is_valid, self, "droppath_rate", self.droppath_rate, expected)
        branches: _Branches = {}
        if self.attention_tpl is not None:
            inputs = {"mask": mask, "positions": positions, **drop_none(bias=bias, kv=kv)}
            branches["attention"] = partial(self.attention, **inputs)
        if memory is not None:
            branches["cross_attention"] = partial(
                self.cross_attention, memory=memory, mask=memory_mask
            )
        segments = mask.query_segments
        is_token = None if segments is None else segments != 0
        if self.feed_forward_tpl is not None:
            branches["feed_forward"] = partial(self.feed_forward, **drop_none(is_token=is_token))
        branches = self._order_branches(branches, mask=mask)
        return self._add_branches(x, branches, droppath_rate=droppath_rate, layer_input=layer_input)

    def init_cache(self, batch_size: int, max_length: int, memory: jax.Array | None = None) -> None:
        """Create an empty cache of keys and values.

        Args:
          batch_size: Number of rows.
          max_length: Number of tokens of a row.
          memory: `[batch, memory_length, memory_dims]`, from which the keys and values of cross
            attention are computed; None without it.
        """
        self._check_memory(memory=memory)
        if self.attention_tpl is not None:
            self.attention.init_cache(batch_size, max_length)
        if self.feed_forward_tpl is not None and hasattr(self.feed_forward, "init_cache"):
            self.feed_forward.init_cache(batch_size, max_length)
        if memory is not None:
            self.cross_attention.init_cache(memory)

    def extend_step(
        self,
        x: jax.Array,
        *,
        time_step: jax.Array,
        positions: jax.Array,
        bias: jax.Array | None = None,
        memory_mask: AttentionMask | None = None,
        query_ends: jax.Array | None = None,
        layer_input: jax.Array | None = None,
        kv: KeysValues | None = None,
    ) -> jax.Array:
        """Apply the layer to the next positions of a cached sequence.

        Args:
          x: `[batch, t, dims]`.
          time_step: int32 scalar, number of tokens in the cache.
          positions: int32 `[batch, t]`, for rotary embeddings.
          bias: float32 `[batch or 1, heads, t, max_length]`, added to the attention logits.
          memory_mask: Mask of cross attention of the t positions; None if there is no memory.
          query_ends: int32 `[batch, t]`, the last position that each token attends, in a prefix
            or an image; the first step must contain it. None for its own.
          layer_input: `[batch, t, layer_dims]`, for `layer_input_tpl`.
          kv: Keys and values of other layers; see `MultiHeadAttention.fprop`.

        Returns:
          `[batch, t, dims]` in the compute dtype.
        """
        self._check_memory(memory_mask=memory_mask)
        branches: _Branches = {}
        if self.attention_tpl is not None:
            inputs = drop_none(bias=bias, query_ends=query_ends, kv=kv)
            inputs |= {"time_step": time_step, "positions": positions}
            branches["attention"] = partial(self.attention.extend_step, **inputs)
        if memory_mask is not None:
            branches["cross_attention"] = partial(
                self.cross_attention.extend_step, mask=memory_mask
            )
        if self.feed_forward_tpl is not None:
            branches["feed_forward"] = self.feed_forward
        return self._add_branches(x, self._order_branches(branches), layer_input=layer_input)

    def _order_branches(
        self, branches: _Branches, *, mask: AttentionMask | None = None
    ) -> _Branches:
        """Return all branches in their order; `mask` is None in a step."""
        del mask
        return branches

    def _add_branches(
        self,
        x: jax.Array,
        branches: _Branches,
        *,
        layer_input: jax.Array | None,
        droppath_rate: jax.Array | None = None,
    ) -> jax.Array:
        reads, expected = self.layer_input_tpl is not None, "a value for a layer_input_tpl alone"
        require(reads == (layer_input is not None), self, "layer_input", layer_input, expected)
        x = name_activation(self.input_dropout(self.cast(x)), "residual")
        source = x
        if self.parallel_shares_norm:
            source = self.attention_norm(x)
        for name, branch in branches.items():
            output = self._branch(name, branch, source if self.parallel else x)
            weight = self.residual_weight
            if name.startswith("feed_forward"):
                weight *= self.feed_forward_residual_weight
            if weight != 1.0:
                output = output * weight
            x = self.residual(x, output, rate=droppath_rate)
            if self.norm_policy == "post":
                x = getattr(self, f"{name}_norm")(x)
            x = self.constrain(x, "batch", "residual_length", "act_embed")
        if layer_input is not None:
            output = self.layer_input(gather_positions(self, x), layer_input)
            output = self.dropout(split_positions(self, output))
            x = self.residual(x, output, rate=droppath_rate)
            x = self.constrain(x, "batch", "residual_length", "act_embed")
        return x * self.cast(self.get_var("output_scale")) if self.has_output_scale else x

    def _branch(
        self, name: str, branch: Callable[[jax.Array], jax.Array], x: jax.Array
    ) -> jax.Array:
        """Return the output of a branch, with the norms of the branch."""
        if self.norm_policy in ("pre", "pre_post") and not self.parallel_shares_norm:
            x = getattr(self, f"{name}_norm")(x)
        output = branch(gather_positions(self, x))
        check_same_shape(getattr(self, name), x, outputs=output)
        output = name_activation(split_positions(self, output), f"{name}_out")
        if self.norm_policy in ("pre_post", "branch"):
            output = getattr(self, f"{name}_post_norm")(output)
        return self.dropout(output)

    def _check_fields(self) -> None:
        norms, has_cross_attention = self.norm_policy, self.cross_attention_tpl is not None
        expected = "another policy with parallel=True, since the norm of a branch changes its input"
        require(not (self.parallel and norms == "post"), self, "norm_policy", norms, expected)
        expected = "False with cross_attention_tpl, which reads the result of self-attention"
        is_valid = not (self.parallel and has_cross_attention)
        require(is_valid, self, "parallel", self.parallel, expected)
        expected = "'pre' or 'pre_post' with parallel_shares_norm=True"
        is_valid = not (self.parallel_shares_norm and norms == "branch")
        require(is_valid, self, "norm_policy", norms, expected)

    def _check_memory(self, **arguments: Any) -> None:
        """Raise `ConfigError` if cross attention lacks an argument, or arguments lack their use."""
        has_cross_attention = self.cross_attention_tpl is not None
        if self.allow_skip_cross_attention and all(value is None for value in arguments.values()):
            return
        expected = "a value if and only if the layer has a cross_attention_tpl"
        for name, value in arguments.items():
            require(has_cross_attention == (value is not None), self, name, value, expected)


def drop_none(**arguments: Any) -> dict[str, Any]:
    """Return the arguments that are not None, since a layer may lack optional ones."""
    return {name: value for name, value in arguments.items() if value is not None}


def is_sequence_parallel(sharding: BoundSharding | None) -> bool:
    """Return whether a mesh splits the positions of residuals further than those of products."""
    if sharding is None:
        return False
    return sharding.num_shards("residual_length") > sharding.num_shards("length")


def gather_positions(layer: BaseLayer, x: jax.Array) -> jax.Array:
    """Return a residual or normalized `x` `[batch, length, dims]` in the layout of products.

    Args:
      layer: Layer that reads `x`; its bound sharding is read.
      x: Activations in any layout.
    """
    if not is_sequence_parallel(layer.inherited("sharding")):
        return x
    # The first constraint is that of the gradient, too: norms before `x` stay split in the backward
    # pass.
    return layer.constrain(layer.constrain(x, *_RESIDUAL), *_WHOLE)


def split_positions(layer: BaseLayer, x: jax.Array) -> jax.Array:
    """Return the output `x` `[batch, length, dims]` of a branch in the layout of residuals.

    Args:
      layer: Layer that adds `x` to a residual; its bound sharding is read.
      x: Activations in any layout.
    """
    if not is_sequence_parallel(layer.inherited("sharding")):
        return x
    return layer.constrain(x, *_RESIDUAL)
