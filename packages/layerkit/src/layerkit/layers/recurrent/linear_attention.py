"""Mixers with a matrix as state: Mamba-2, gated delta net and Kimi delta attention.

A Transformer layer takes them as its `attention_tpl`. `layerkit.ops.recurrence.linear_attention`
defines the states.

    queries, keys, values: project → convolve over the last tokens → activation
    outputs: read the state → gated norm → project

Heads are split over devices by the logical axes of attention, and rows by `length`.
"""

from __future__ import annotations

from typing import ClassVar

import jax
import jax.numpy as jnp

from layerkit.base.base_layer import BaseLayer
from layerkit.base.weights import WeightHParams, WeightInit
from layerkit.config import Config, sub_config_field
from layerkit.config.checks import check_divisible, check_last_axis, check_sizes, require
from layerkit.config.hparams import Conditions
from layerkit.layers.attention.base_attention import HeadProjection, OutputProjection
from layerkit.layers.attention.cache import Axes
from layerkit.layers.basic.elementwise import BaseActivation, Sigmoid, SiLU
from layerkit.layers.basic.linears import Linear
from layerkit.layers.recurrent.mixer_parts import CausalConvolution, GatedNorm, TimeSteps
from layerkit.layers.recurrent.token_mixer import State, TokenMixer
from layerkit.ops.recurrence.linear_attention import linear_attention
from layerkit.ops.remat import name_activation

_KEYS, _VALUES = ("kv_heads", "act_kv_heads"), ("heads", "act_heads")
_MULTIPLIED = ("gate", "value", "key", "query", "step")


class LinearAttention(TokenMixer):
    """Base class of mixers whose state is a matrix per head, with decay.

    Attributes:
      num_key_heads: Number of heads of queries and keys, a divisor of num_value_heads. A single
        head is replicated over the mesh axes that split heads.
      num_value_heads: Number of heads of values and outputs, and of states.
      key_dim_per_head: Size of a query and a key.
      value_dim_per_head: Size of a value.
      conv_width: Number of tokens that the convolutions of queries, keys and values read.
      use_conv_bias: True to add a bias in the convolutions.
      use_bias: True to add a bias in the projections.
      gate_rank: Size between the two factors of the projections to gates and to decays; None for
        one projection.
      tokens_per_chunk: Largest number of tokens that are computed at once, a power of two. It
        affects speed, not results.
      projection_tpl: Projections of the inputs to heads.
      down_tpl: First factors of projections with a `gate_rank`.
      conv_tpl: Convolutions.
      activation_tpl: Activation after the convolutions, and of the gate without a norm.
      time_step_tpl: Time steps and decays.
      norm_tpl: Gated norm of the outputs of heads; None for a gate without a norm.
      output_tpl: Projection of the heads to the output.

    Raises:
      ConfigError: A size is below one or not divisible.
    """

    used_only_if: ClassVar[Conditions] = {"down_tpl": "gate_rank"}
    state_axes: ClassVar[dict[str, Axes]] = {
        "state": ("batch", "act_heads", None, None),
        "query_history": ("batch", None, "act_kv_heads", "head_dim"),
        "key_history": ("batch", None, "act_kv_heads", "head_dim"),
        "value_history": ("batch", None, "act_heads", "head_dim"),
    }
    decays_channels: ClassVar[bool] = False
    """True for a decay of each coordinate of a key, False for one of each head."""

    num_key_heads: int = 0
    num_value_heads: int = 0
    key_dim_per_head: int = 0
    value_dim_per_head: int = 0
    conv_width: int = 4
    use_conv_bias: bool = False
    use_bias: bool = False
    gate_rank: int | None = None
    tokens_per_chunk: int = 64
    projection_tpl: Config[BaseLayer] = sub_config_field(HeadProjection.HParams)
    down_tpl: Config[BaseLayer] = sub_config_field(Linear.HParams, weight_axes=("embed", None))
    conv_tpl: Config[BaseLayer] = sub_config_field(CausalConvolution.HParams)
    activation_tpl: Config[BaseActivation] = sub_config_field(SiLU.HParams)
    time_step_tpl: Config[BaseLayer] = sub_config_field(TimeSteps.HParams)
    norm_tpl: Config[BaseLayer] | None = sub_config_field(GatedNorm.HParams)
    output_tpl: Config[BaseLayer] = sub_config_field(OutputProjection.HParams)

    def setup(self) -> None:
        """Check the fields and create the children."""
        keys, values = self.num_key_heads, self.num_value_heads
        key_dims, value_dims = self.key_dim_per_head, self.value_dim_per_head
        sizes = {"input_dims": self.input_dims, "num_key_heads": keys, "num_value_heads": values}
        sizes |= {"key_dim_per_head": key_dims, "value_dim_per_head": value_dims}
        check_sizes(self, **sizes, conv_width=self.conv_width, gate_rank=self.gate_rank)
        check_divisible(self, by=("num_key_heads", keys), num_value_heads=values)
        is_power = self.tokens_per_chunk >= 1 and self.tokens_per_chunk.bit_count() == 1
        require(is_power, self, "tokens_per_chunk", self.tokens_per_chunk, "a power of two")
        for name, heads, dims, axes in (
            ("query", keys, key_dims, _KEYS),
            ("key", keys, key_dims, _KEYS),
            ("value", values, value_dims, _VALUES),
        ):
            self._create_projection(name, heads, dims, axes)
            self.create_child(
                f"{name}_conv",
                self.conv_tpl,
                num_heads=heads,
                head_dim=dims,
                width=self.conv_width,
                use_bias=self.use_conv_bias,
                weight_axes=(None, axes[0], "head_dim"),
            )
        channels = key_dims if self.decays_channels else 1
        self._create_projection("gate", values, value_dims, _VALUES, rank=self.gate_rank)
        self._create_projection("step", values, channels, _VALUES, rank=self.gate_rank)
        self.create_child("activation", self.activation_tpl)
        self.create_child("time_step", self.time_step_tpl, num_heads=values, channels=channels)
        if self.norm_tpl is not None:
            sizes = {"num_heads": values, "dims": value_dims, **self._norm_groups()}
            self.create_child("norm", self.norm_tpl, **sizes)
        self.create_child(
            "output",
            self.output_tpl,
            num_heads=values,
            head_dim=value_dims,
            output_dims=self.input_dims,
            use_bias=self.use_bias,
        )

    def _norm_groups(self) -> dict[str, int]:
        """Return the groups of heads of the norm; none for a norm of each head."""
        return {}

    def _create_projection(
        self, name: str, heads: int, dims: int, axes: tuple[str, str], *, rank: int | None = None
    ) -> None:
        if rank is not None:
            sizes = {"input_dims": self.input_dims, "output_dims": rank}
            self.create_child(f"{name}_down", self.down_tpl, **sizes)
        self.create_child(
            name,
            self.projection_tpl,
            input_dims=rank or self.input_dims,
            num_heads=heads,
            head_dim=dims,
            use_bias=self.use_bias,
            weight_axes=("embed" if rank is None else None, axes[0], "head_dim"),
            activation_axes=("batch", "length", axes[1], "head_dim"),
        )

    def initial_state(self, batch_size: int) -> State:
        """Return the empty state and empty histories of the convolutions, `[batch, …]`."""
        keys, values = self.key_dim_per_head, self.value_dim_per_head
        shape = (batch_size, self.num_value_heads, keys, values)
        history = (batch_size, self.conv_width - 1)
        key_shape, value_shape = (self.num_key_heads, keys), (self.num_value_heads, values)
        sizes = {"query": key_shape, "key": key_shape, "value": value_shape}
        return {"state": jnp.zeros(shape, jnp.float32)} | {
            f"{name}_history": jnp.zeros((*history, *size), self.compute_dtype)
            for name, size in sizes.items()
        }

    def mix(
        self, x: jax.Array, state: State, *, segments: jax.Array | None
    ) -> tuple[jax.Array, State]:
        """Continue rows `[batch, t, input_dims]`; see `TokenMixer.mix`."""
        check_last_axis(self, x, input_dims=self.input_dims)
        x, after, heads = self.cast(x), {}, {}
        for name in ("query", "key", "value"):
            convolve, history = getattr(self, f"{name}_conv"), f"{name}_history"
            projected = self._project(name, x)
            mixed, after[history] = convolve(projected, state[history], segments=segments)
            heads[name] = name_activation(self.activation(mixed), name)
        steps, log_decay = self.time_step(self._project("step", x))
        arguments = self._arguments(x, heads, steps)
        outputs, after["state"] = linear_attention(
            **arguments,
            log_decay=log_decay,
            state=state["state"],
            segments=segments,
            chunk_size=self.tokens_per_chunk,
            parts=self._num_parts(x.shape[1]),
            constrain=self._lay_out_chunks,
        )
        outputs = self._finish(outputs, heads["value"])
        gate = self._project("gate", x)
        if self.norm_tpl is None:
            outputs = self.activation.gate(gate, outputs)
        else:
            outputs = self.norm(outputs, gate)
        outputs = self.constrain(self.cast(outputs), "batch", "length", "act_heads", "head_dim")
        return self.output(outputs), after

    def _arguments(
        self, x: jax.Array, heads: dict[str, jax.Array], steps: jax.Array
    ) -> dict[str, jax.Array]:
        """Return `query`, `key`, `value` and, for the delta rule, `beta` of `linear_attention`.

        They follow from the inputs, the convolved `[batch, t, heads, dims]` and the time steps.
        """
        raise NotImplementedError(f"{type(self).__qualname__} does not define _arguments")

    def _finish(self, outputs: jax.Array, value: jax.Array) -> jax.Array:
        """Return the outputs `[batch, t, heads, dims]` of heads before gate and norm."""
        del value
        return outputs

    def _project(self, name: str, x: jax.Array) -> jax.Array:
        if self.gate_rank is not None and name in ("gate", "step"):
            x = getattr(self, f"{name}_down")(x)
        heads: jax.Array = getattr(self, name)(x)
        return heads

    def _num_parts(self, length: int) -> int:
        """Return the number of devices over which rows are split."""
        sharding = self.inherited("sharding")
        return 1 if sharding is None or length == 1 else sharding.num_shards("length")

    def _lay_out_chunks(self, x: jax.Array) -> jax.Array:
        """Lay out `[chunks, parts, batch, heads, tokens, …]` with the parts of rows on devices."""
        if x.shape[1] == 1:
            return x
        heads = "act_heads" if x.shape[3] == self.num_value_heads else "act_kv_heads"
        return self.constrain(x, None, "length", "batch", heads, *[None] * (x.ndim - 4))


class Mamba2(LinearAttention):
    """Mamba-2, a state-space layer (Dao and Gu, 2024, arXiv:2405.21060).

    In its terms, C is the query, B the key (of `num_key_heads` groups with states of size
    `key_dim_per_head`), x the value and z the gate. The update of a step Δ is Δ·x, and the outputs
    have the skip connection D·x. The other fields are those of `LinearAttention`.

    Attributes:
      norm_groups: Number of groups of heads that the norm normalizes together; None for
        `num_key_heads`.
      projection_multipliers: Factors of the projections to gate, value, key, query and time step
        (Falcon-H1); None for 1.
    """

    used_only_if: ClassVar[Conditions] = {"norm_groups": "norm_tpl"}

    norm_groups: int | None = None
    projection_multipliers: tuple[float, float, float, float, float] | None = None
    norm_tpl: Config[BaseLayer] | None = sub_config_field(GatedNorm.HParams, gate_first=True)

    def setup(self) -> None:
        """Check the fields and create the children and the skip connection."""
        super().setup()
        factors, names = self.projection_multipliers, _MULTIPLIED
        is_valid = factors is None or len(factors) == len(names)
        expected = f"a factor for each of {', '.join(names)}"
        require(is_valid, self, "projection_multipliers", factors, expected)
        ones = WeightInit.Constant(1.0)
        self.create_variable("skip", WeightHParams((self.num_value_heads,), ("heads",), init=ones))

    def _norm_groups(self) -> dict[str, int]:
        return {"num_groups": self.norm_groups or self.num_key_heads}

    def _project(self, name: str, x: jax.Array) -> jax.Array:
        heads = super()._project(name, x)
        if self.projection_multipliers is None:
            return heads
        return heads * self.projection_multipliers[_MULTIPLIED.index(name)]

    def _arguments(
        self, x: jax.Array, heads: dict[str, jax.Array], steps: jax.Array
    ) -> dict[str, jax.Array]:
        del x
        return {**heads, "value": heads["value"] * steps}

    def _finish(self, outputs: jax.Array, value: jax.Array) -> jax.Array:
        return outputs + self.theta.skip[:, None] * value


class GatedDeltaNet(LinearAttention):
    """A gated delta net (Yang et al., 2024, arXiv:2412.06464), as in Qwen3-Next.

    Queries and keys are normalized to length 1, and a token replaces the share β = sigmoid(w·x) of
    what the state holds for its key. The other fields are those of `LinearAttention`.

    Attributes:
      allow_negative_eigenvalues: True for β = 2·sigmoid(w·x), with which a token may also change
        the sign of what the state holds (Grazzi et al., 2024, arXiv:2411.12537; OLMo Hybrid).
    """

    allow_negative_eigenvalues: bool = False

    def setup(self) -> None:
        """Check the fields and create the children."""
        super().setup()
        self._create_projection("beta", self.num_value_heads, 1, _VALUES)

    def _arguments(
        self, x: jax.Array, heads: dict[str, jax.Array], steps: jax.Array
    ) -> dict[str, jax.Array]:
        del steps
        query, key = (_normalize(heads[name]) for name in ("query", "key"))
        beta = jax.nn.sigmoid(self.beta(x)[..., 0].astype(jnp.float32))
        beta = 2.0 * beta if self.allow_negative_eigenvalues else beta
        query = query * self.key_dim_per_head**-0.5
        return {"query": query, "key": key, "value": heads["value"], "beta": beta}


class KimiDeltaAttention(GatedDeltaNet):
    """Kimi delta attention (Kimi Team, 2025, arXiv:2510.26692): a delta net that decays channels.

    Each coordinate of a key decays by itself. The projections to decays and gates have two factors,
    of `gate_rank` (`value_dim_per_head` in Kimi Linear). The fields are those of `GatedDeltaNet`.
    """

    decays_channels: ClassVar[bool] = True

    norm_tpl: Config[BaseLayer] | None = sub_config_field(
        GatedNorm.HParams, activation_tpl=Sigmoid.HParams.config()
    )


def _normalize(x: jax.Array) -> jax.Array:
    """Return float32 `[…, dims]` of length 1; the ε of Qwen3-Next keeps zeros finite."""
    wide = x.astype(jnp.float32)
    return wide * jax.lax.rsqrt(jnp.sum(wide * wide, axis=-1, keepdims=True) + 1e-6)
