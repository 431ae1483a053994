"""Base class of self-attention and cross-attention, and the projections into and out of heads.

`BaseAttention` has the projections into heads, the norms of queries and keys, the scale, attention,
and the output projection. Subclasses decide the source of keys and values and the use of positions.

Projections have separate axes for heads and for the size of a head: heads are split over devices by
a logical axis, and the fans of the initializer are those of all heads together.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp

from layerkit.base.base_layer import BaseLayer
from layerkit.base.sharding import is_single_cpu
from layerkit.base.step_reports import STEP_MAXIMA, StepMaximum, immutable_error
from layerkit.base.weights import WeightHParams, WeightInit
from layerkit.config import Config, fields_of, sub_config_field
from layerkit.config.checks import check_last_axis, check_positive, check_sizes, require
from layerkit.config.hparams import Conditions
from layerkit.layers.basic.dots import Dot, add_bias, create_dot, matmul
from layerkit.layers.basic.elementwise import Dropout
from layerkit.layers.basic.normalizations import BaseNormalization
from layerkit.layers.quantization.lora import is_lora
from layerkit.ops.attention.backends import BackendName
from layerkit.ops.attention.distance_bias import LogitBias
from layerkit.ops.attention.dot_product import (
    AttentionOptions,
    ContextParallel,
    dot_product_attention,
)
from layerkit.ops.attention.masks import AttentionMask

# 1/softplus(0) = 1/ln 2, so that the learned scale of a coordinate is 1 at p = 0.
_INVERSE_SOFTPLUS_OF_0 = 1.442695041

_KV_WEIGHT = ("embed", "kv_heads", "head_dim")
_KV_ACTIVATION = ("batch", "length", "act_kv_heads", "head_dim")


class HeadProjection(BaseLayer):
    """A projection of `[batch, length, input_dims]` to `[batch, length, num_heads, head_dim]`.

    Attributes:
      input_dims: Size of the model dimension.
      num_heads: Number of heads.
      head_dim: Size of a head.
      use_bias: Adds `b` `[num_heads, head_dim]`, which starts at 0.
      weight_axes: Logical axes of `w` `[input_dims, num_heads, head_dim]`.
      activation_axes: Logical axes of the output.
      dot_tpl: Implementation of the product; None for `jnp.matmul`. See
        `layerkit.layers.basic.dots`.
    """

    input_dims: int = 0
    num_heads: int = 0
    head_dim: int = 0
    use_bias: bool = False
    weight_axes: tuple[str | None, ...] = ("embed", "heads", "head_dim")
    activation_axes: tuple[str | None, ...] = ("batch", "length", "act_heads", "head_dim")
    dot_tpl: Config[Dot] | None = sub_config_field(None)

    def setup(self) -> None:
        """Check the fields and create the weights."""
        sizes = {"input_dims": self.input_dims, "num_heads": self.num_heads}
        check_sizes(self, **sizes, head_dim=self.head_dim)
        shape = (self.input_dims, self.num_heads, self.head_dim)
        weight = WeightHParams(shape, self.weight_axes, fan_in_dims=(0,), fan_out_dims=(1, 2))
        self.create_variable("w", weight, is_factor=True)
        create_dot(self, weight)
        if self.use_bias:
            bias = WeightHParams(shape[1:], self.weight_axes[1:], init=WeightInit.Constant(0.0))
            self.create_variable("b", bias)

    def fprop(self, x: jax.Array, *, leading: tuple[int, ...] | None = None) -> jax.Array:
        """Project inputs to heads `[batch, length, num_heads, head_dim]`.

        Args:
          x: `[batch, length, input_dims]`, or merged tokens `[tokens, input_dims]`.
          leading: (batch, length) of merged tokens.
        """
        check_last_axis(self, x, input_dims=self.input_dims)
        w = self.theta.w
        heads = matmul(self, self.cast(x), w.reshape(self.input_dims, -1))
        heads = heads.reshape(*(leading or x.shape[:-1]), self.num_heads, self.head_dim)
        if self.use_bias:
            heads = add_bias(heads, self.theta.b)
        return self.constrain(heads, *self.activation_axes)


class OutputProjection(BaseLayer):
    """A projection of `[batch, length, num_heads, head_dim]` to `[batch, length, output_dims]`.

    Attributes:
      output_dims: Size of the model dimension.
      num_heads: Number of heads.
      head_dim: Size of a head.
      use_bias: Adds `b` `[output_dims]`, which starts at 0.
      weight_axes: Logical axes of `w` `[num_heads, head_dim, output_dims]`.
      activation_axes: Logical axes of the output.
      dot_tpl: Implementation of the product; None for `jnp.matmul`. See
        `layerkit.layers.basic.dots`.
    """

    output_dims: int = 0
    num_heads: int = 0
    head_dim: int = 0
    use_bias: bool = False
    weight_axes: tuple[str | None, ...] = ("heads", "head_dim", "embed")
    activation_axes: tuple[str | None, ...] = ("batch", "residual_length", "act_embed")
    dot_tpl: Config[Dot] | None = sub_config_field(None)

    def setup(self) -> None:
        """Check the fields and create the weights."""
        sizes = {"output_dims": self.output_dims, "num_heads": self.num_heads}
        check_sizes(self, **sizes, head_dim=self.head_dim)
        shape = (self.num_heads, self.head_dim, self.output_dims)
        weight = WeightHParams(
            shape,
            self.weight_axes,
            fan_in_dims=(0, 1),
            fan_out_dims=(2,),
            last_axes=(0, 1),  # Praxis stores [output_dims, num_heads, head_dim].
        )
        self.create_variable("w", weight, is_factor=True)
        create_dot(self, weight)
        if self.use_bias:
            bias = WeightHParams(shape[2:], self.weight_axes[2:], init=WeightInit.Constant(0.0))
            self.create_variable("b", bias)

    def fprop(self, heads: jax.Array) -> jax.Array:
        """Project heads `[batch, length, num_heads, head_dim]` to outputs."""
        heads, w = self.cast(heads), self.theta.w
        if self.dot_tpl is None and not is_single_cpu(self.inherited("sharding")):
            # The backward pass then keeps the heads once, for attention and for this product.
            outputs = jnp.einsum("...hd,hdo->...o", heads, w)
        else:
            merged = heads.reshape(*heads.shape[:-2], -1)
            outputs = matmul(self, merged, w.reshape(-1, self.output_dims))
        if self.use_bias:
            outputs = add_bias(outputs, self.theta.b)
        return self.constrain(outputs, *self.activation_axes)


@dataclasses.dataclass(frozen=True)
class QkClip:
    """The rule of QK-clip, which scales the logits of a head by c = min(1, threshold / largest).

    Kimi K2 (2025, arXiv:2507.20534): queries and keys by √c, but queries by c if other heads read
    the key too. The paper has such keys in the rotated coordinates of latent attention only; here
    they are also those of grouped queries. So each head has its own c and changes no other. Logits
    are those of a step's pairs that may attend, without padding, before bias and cap.

    Attributes:
      threshold: Largest logit that scales nothing.
      owns_keys: True if a key head has no reader but the query head of its number.
      has_bias: True if the projections have biases.
      combined_heads: Number of key heads of a projection `qkv`; None with separate projections.
      is_shared: Whether all heads share the key of each coordinate, or of all coordinates.
    """

    threshold: float
    owns_keys: bool
    has_bias: bool
    combined_heads: int | None = None
    is_shared: tuple[bool, ...] = (False,)

    def __call__(self, largest: jax.Array) -> dict[tuple[str, str], jax.Array]:
        """Return the factors of the weights by path; `largest` logits are `[..., heads]`."""
        gamma = (self.threshold / jnp.maximum(largest, self.threshold))[..., None]
        key = jnp.sqrt(gamma) if self.owns_keys else jnp.ones_like(gamma)
        query, inputs = jnp.where(jnp.array(self.is_shared), gamma, gamma / key), -3
        factors = {"query": query, "key": key} if self.owns_keys else {"query": query}
        if self.combined_heads is not None:
            shape, inputs = (*largest.shape[:-1], self.combined_heads, -1, 1), -4
            query, key = query.reshape(shape), key.reshape(shape)[..., :1, :]
            factors = {"qkv": jnp.concatenate([query, key, jnp.ones_like(key)], axis=-2)}
        weights = {(child, "w"): jnp.expand_dims(x, inputs) for child, x in factors.items()}
        return weights | {(child, "b"): x for child, x in factors.items() if self.has_bias}


class AttentionLayer(BaseLayer):
    """The base class of layers that attend. Override `attend` for another function of the logits.

    A subclass has the fields `logit_scale`, `logit_cap`, `qk_clip`, `dropout_rate`,
    `zero_fully_masked_rows`, `backend`, `context_parallel` and `kernel_blocks`, and a child
    `dropout`.
    """

    def attend(
        self, query: jax.Array, key: jax.Array, value: jax.Array, options: AttentionOptions
    ) -> jax.Array:
        """Return what each query reads; whole rows and cached steps call this method.

        An override gives `used_only_if` the value "never" for the fields that it does not use.

        Args:
          query: `[batch, queries, heads, dims]`, normalized and rotated.
          key: `[batch, keys, kv_heads, dims]`; the cached ones in a step.
          value: `[batch, keys, kv_heads, value_dim]`.
          options: Mask, scale, bias and the other options; `options.mask.dense()` is True for the
            pairs that may attend, `[batch, 1, queries, keys]`.

        Returns:
          `[batch, queries, heads, value_dim]` in the dtype of `value`.
        """
        return dot_product_attention(query, key, value, options)

    def prompt_arrays(self) -> tuple[str, ...]:
        """Return the names of cached arrays `[…, slots, dims]` that samples of a prompt may share.

        `layerkit.decoding.lazy_prefix_broadcast` moves them to the collection `PROMPT_CACHE`, where
        `extend_step` reads them by `read_prompt_cache`.
        """
        return ()

    def _options(
        self: Any,
        mask: AttentionMask,
        bias: LogitBias | None,
        *,
        head_dim: int,
        cached: bool,
        sinks: jax.Array | None = None,
        prompts: Sequence[jax.Array] = (),
    ) -> AttentionOptions:
        """Return the options of attention over heads of size `head_dim`.

        `prompts` are keys and values that the samples of a prompt share, or empty.
        With `cached` keys the compiler splits the work: a step has few queries, for which a kernel,
        which the compiler cannot split, is not faster.
        """
        is_own, expected = (
            type(self).attend is not AttentionLayer.attend,
            "a layer without `attend`",
        )
        expected += " of its own, with lazy_prefix_broadcast=True"
        require(not (prompts and is_own), self, "class", type(self).__name__, expected)
        return AttentionOptions(
            scale=1.0 / math.sqrt(head_dim) if self.logit_scale is None else self.logit_scale,
            mask=mask,
            bias=bias,
            sinks=sinks,
            prompts=(prompts[0], prompts[1]) if prompts else None,
            logit_cap=self.logit_cap,
            dropout=self.dropout if self.dropout_rate and self.is_training else None,
            zero_fully_masked_rows=self.zero_fully_masked_rows,
            backend="xla" if cached else self.backend,
            sharding=None if cached else self.inherited("sharding"),
            context_parallel=self.context_parallel,
            kernel_blocks=self.kernel_blocks,
        )

    def _clip_logits(
        self: Any, query: jax.Array, key: jax.Array, options: AttentionOptions, **rule: Any
    ) -> None:
        """Report the largest logits of whole rows; `rule` has fields of a `QkClip`."""
        if not self.is_mutable_collection(STEP_MAXIMA):
            if self.qk_clip is not None and self.is_training:
                raise immutable_error(self, "no weight would be scaled", "qk_clip", STEP_MAXIMA)
        elif self.qk_clip is not None:
            from layerkit.ops.attention.blockwise import BlockwiseAttention

            is_whole, expected = options.num_length_shards == 1, "None if devices split rows"
            require(is_whole, self, "qk_clip", self.qk_clip, expected)
            assert options.mask is not None
            query, key = jax.lax.stop_gradient((query, key))
            logits = BlockwiseAttention(options.scale).largest_logits(query, key, options.mask)
            maximum = StepMaximum(logits, QkClip(self.qk_clip, **rule))
            self.sow(STEP_MAXIMA, "logits_of_qk_clip", maximum)

    def _check_options(self: Any) -> None:
        check_positive(self, logit_cap=self.logit_cap, logit_scale=self.logit_scale)
        check_positive(self, qk_clip=self.qk_clip)
        owners = [getattr(self, f"{name}_tpl", None) for name in ("query", "key", "qkv", "up")]
        has_adapter = any(is_lora(getattr(owner, "dot_tpl", None)) for owner in owners)
        fits = not (self.qk_clip and has_adapter and self.is_training)
        require(fits, self, "qk_clip", self.qk_clip, "None with adapters of queries or keys")
        blocks = self.kernel_blocks
        is_valid = blocks is None or [type(size) for size in blocks] == [int, int]
        is_valid = is_valid and all(size >= 16 and size.bit_count() == 1 for size in blocks or ())
        expected = "two powers of two of at least 16, of queries and of keys"
        require(is_valid, self, "kernel_blocks", blocks, expected)


class BaseAttention(AttentionLayer):
    """A multi-head attention layer without a source of keys and values.

    Attributes:
      input_dims: Size of the model dimension.
      num_heads: Number of query heads.
      num_kv_heads: Number of key and value heads, a divisor of num_heads; None for num_heads, 1 for
        multi-query attention (Shazeer, 2019). A single head is replicated over the mesh axes that
        split heads. Other numbers must be divisible by the size of these axes, unless
        `ShardingRules.replace` sets the rules of `kv_heads` and `act_kv_heads` to None. Each device
        then computes all key heads and attends with those that its query heads read.
      dim_per_head: Size of a head; None for input_dims / num_heads.
      use_bias: Adds a bias in the projections.
      use_output_bias: Adds a bias in the output projection; None for the value of `use_bias`.
        Qwen 2 has biases in the input projections only.
      use_key_bias: True for the value of `use_bias` in the projection of keys; False for no bias
        there (Whisper). Without rotary positions and norms, a bias of keys changes no probability.
      qk_norm_tpl: Norm of queries and keys (Henry et al., 2020, arXiv:2010.04245); None for no
        norm.
      qk_norm_over: `head` to normalize each head (Qwen 3, Gemma 3), or `projection` to normalize
        all heads of a token together (OLMo 2).
      per_dim_scale: Learns a scale for each coordinate of a head, 1.442695041·softplus(p), which
        multiplies the scale of the logits; p starts at 0, which is a scale of 1.
      logit_scale: Factor of the products of queries and keys; None for 1/√dim_per_head. T5 uses
        1.0.
      logit_cap: Bound of the logits, which tanh squeezes into ±logit_cap (Gemma 2); None for no
        bound.
      qk_clip: Threshold of `QkClip`, which scales weights after a training step (100 in Kimi K2);
        None for no scaling. It computes the logits once more, in blocks, on every backend.
      use_sinks: Learns a logit per head that takes probability and adds no value (gpt-oss), so
        that a head may attend to nothing. It starts at 0.
      sink_logit: Fixed logit of such a sink, the same in all heads, instead of a learned one (GLaM:
        0.0); None for none.
      dropout_rate: Dropout rate of the attention probabilities in training.
      zero_fully_masked_rows: True for an output of exactly 0, instead of a mean, where a query may
        attend no key. With sinks it is always 0.
      backend: Name of the implementation of `fprop`; see `layerkit.ops.attention.backends`.
        Cached steps always run on `xla`.
      context_parallel: `all_gather`, `ring` or `ulysses`, for whole rows that are split over
        devices; see `layerkit.ops.attention.context_parallel`.
      kernel_blocks: Largest number of (queries, keys) in a block of a Pallas kernel, powers of two;
        None for the default of the device; see `layerkit.ops.attention.pallas.kernel_blocks`. It
        affects speed, not results.
      query_tpl: Projection into query heads.
      key_tpl: Projection into key heads.
      value_tpl: Projection into value heads.
      output_tpl: Projection of the heads to the output.

    Raises:
      ConfigError: A size is not divisible, a number is out of range, or a name is unknown.
    """

    used_only_if: ClassVar[Conditions] = {
        "qk_norm_over": "qk_norm_tpl",
        "qk_clip": ("not qk_norm_tpl", "use_key_bias"),
        "use_key_bias": "use_bias",
    }

    input_dims: int = 0
    num_heads: int = 0
    num_kv_heads: int | None = None
    dim_per_head: int | None = None
    use_bias: bool = False
    use_output_bias: bool | None = None
    use_key_bias: bool = True
    qk_norm_tpl: Config[BaseNormalization] | None = sub_config_field(None)
    qk_norm_over: Literal["head", "projection"] = "head"
    per_dim_scale: bool = False
    logit_scale: float | None = None
    logit_cap: float | None = None
    qk_clip: float | None = None
    use_sinks: bool = False
    sink_logit: float | None = None
    dropout_rate: float = 0.0
    zero_fully_masked_rows: bool = False
    backend: BackendName = "auto"
    context_parallel: ContextParallel = "all_gather"
    kernel_blocks: tuple[int, int] | None = None
    query_tpl: Config[BaseLayer] = sub_config_field(HeadProjection.HParams)
    key_tpl: Config[BaseLayer] = sub_config_field(
        HeadProjection.HParams, weight_axes=_KV_WEIGHT, activation_axes=_KV_ACTIVATION
    )
    value_tpl: Config[BaseLayer] = sub_config_field(
        HeadProjection.HParams, weight_axes=_KV_WEIGHT, activation_axes=_KV_ACTIVATION
    )
    output_tpl: Config[BaseLayer] = sub_config_field(OutputProjection.HParams)

    def _create_query_key_value(
        self, memory_dims: int, *, projections: Sequence[str] = ("key", "value")
    ) -> None:
        """Create the children `query` and `projections`; the latter read `[…, memory_dims]`."""
        kv_heads, head_dim = self._head_sizes()
        shared = {"head_dim": head_dim, "use_bias": self.use_bias}
        query = {"input_dims": self.input_dims, "num_heads": self.num_heads}
        self.create_child("query", self.query_tpl, **query, **shared)
        for name in projections:
            sizes = {**shared, "input_dims": memory_dims, "num_heads": kv_heads}
            if name == "key" and not self.use_key_bias:
                sizes["use_bias"] = False
            self.create_child(name, getattr(self, f"{name}_tpl"), **sizes)

    def _create_attention_parts(self, *, has_key: bool = True) -> None:
        """Create norms, scale, sinks, dropout and the output projection."""
        kv_heads, head_dim = self._head_sizes()
        with_bias = self.use_bias if self.use_output_bias is None else self.use_output_bias
        self.create_child(
            "output",
            self.output_tpl,
            num_heads=self.num_heads,
            head_dim=head_dim,
            output_dims=self.input_dims,
            use_bias=with_bias,
        )
        if self.qk_norm_tpl is not None:
            whole = self.qk_norm_over == "projection"
            normed = [("query_norm", self.num_heads), ("key_norm", kv_heads)]
            for name, heads in normed if has_key else normed[:1]:
                dims = heads * head_dim if whole else head_dim
                sizes = {"dims": dims, "num_heads": 1 if whole else heads}
                self.create_child(name, self.qk_norm_tpl, **fields_of(self.qk_norm_tpl, **sizes))
        zeros = WeightInit.Constant(0.0)
        if self.per_dim_scale:
            self.create_variable("scale", WeightHParams((head_dim,), ("head_dim",), init=zeros))
        if self.use_sinks:
            self.create_variable("sinks", WeightHParams((self.num_heads,), ("heads",), init=zeros))
        self.create_child("dropout", Dropout.HParams.config(rate=self.dropout_rate))

    def _normalize(self, norm: BaseLayer, heads: jax.Array) -> jax.Array:
        """Normalize `[batch, length, heads, head_dim]` over the extent `qk_norm_over`."""
        if self.qk_norm_over == "head":
            normed: jax.Array = norm(heads)
            return normed
        merged = heads.reshape(*heads.shape[:2], -1)
        whole: jax.Array = norm(merged)
        return whole.reshape(heads.shape)

    def _read(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        mask: AttentionMask,
        bias: LogitBias | None,
        *,
        cached: bool,
        gate: jax.Array | None = None,
        prompts: Sequence[jax.Array] = (),
        are_keys_shared: bool = False,
    ) -> jax.Array:
        """Return the output `[batch, queries, input_dims]` of attention and its projection.

        The sigmoid of `gate`, of the shape of the queries, multiplies what they read. `prompts` are
        keys and values that samples share; see `AttentionOptions`. `are_keys_shared` says that
        other layers may read the keys, so QK-clip leaves them as they are.
        """
        if self.per_dim_scale:
            scale = jax.nn.softplus(self.theta.scale.astype(jnp.float32))
            query = query * (_INVERSE_SOFTPLUS_OF_0 * scale)
        # A norm or another child may have a compute dtype of its own; kernels require a single one.
        query, key, value = (self.cast(heads) for heads in (query, key, value))
        sizes: dict[str, Any] = {
            "head_dim": query.shape[-1],
            "sinks": self._sinks(),
            "prompts": prompts,
        }
        options = self._options(mask, bias, cached=cached, **sizes)
        if not cached:
            rule = self._clip_rule()
            rule["owns_keys"] = rule["owns_keys"] and not are_keys_shared
            self._clip_logits(query, key, options, has_bias=self.use_bias, **rule)
        read = self.attend(query, key, value, options)
        if gate is not None:
            read = read * jax.nn.sigmoid(gate)
        out: jax.Array = self.output(
            self.constrain(read, "batch", "length", "act_heads", "head_dim")
        )
        return out

    def _clip_rule(self) -> dict[str, Any]:
        return {"owns_keys": self._head_sizes()[0] == self.num_heads}

    def _sinks(self) -> jax.Array | None:
        """Return the logit of the sink of each head, `[heads]`; None without sinks."""
        if self.sink_logit is not None:
            return jnp.full((self.num_heads,), self.sink_logit, jnp.float32)
        sinks: jax.Array | None = self.theta.sinks if self.use_sinks else None
        return sinks

    def _head_sizes(self) -> tuple[int, int]:
        """Return (num_kv_heads, dim_per_head) after checking that the sizes divide."""
        check_sizes(self, input_dims=self.input_dims, num_heads=self.num_heads)
        head_dim, kv_heads = self.dim_per_head, self.num_kv_heads
        if head_dim is None:
            expected = f"a divisor of input_dims={self.input_dims}, or a value of dim_per_head"
            divides = self.input_dims % self.num_heads == 0
            require(divides, self, "num_heads", self.num_heads, expected)
            head_dim = self.input_dims // self.num_heads
        if kv_heads is None:
            kv_heads = self.num_heads
        check_sizes(self, dim_per_head=head_dim, num_kv_heads=kv_heads)
        divides = self.num_heads % kv_heads == 0
        require(divides, self, "num_kv_heads", kv_heads, f"a divisor of num_heads={self.num_heads}")
        return kv_heads, head_dim

    def _check_options(self) -> None:
        super()._check_options()
        is_fixed = self.sink_logit is not None
        expected = "None with use_sinks=True, which learns the logits"
        require(not (is_fixed and self.use_sinks), self, "sink_logit", self.sink_logit, expected)
