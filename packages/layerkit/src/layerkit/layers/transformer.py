"""One layer of a Transformer: attention, perhaps cross attention, and feed-forward.

Each of them is a branch f around a residual, and `norm_policy` says where the norms stand:

| policy | | models |
|---|---|---|
| `pre` | x + f(norm(x)) | GPT-2, Llama (Xiong et al., 2020, arXiv:2002.04745) |
| `post` | norm(x + f(x)) | the Transformer of 2017, BERT |
| `pre_post` | x + post_norm(f(norm(x))) | Gemma 2 and 3 |
| `branch` | x + post_norm(f(x)) | OLMo 2 |

Branches run one after another, or, with `parallel`, side by side on the same input (GPT-J, PaLM):

    x = x + attention(attention_norm(x)) + feed_forward(feed_forward_norm(x))

`extend_step` is the same computation as `fprop`, for the next positions of a cached sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import jax
from flax import linen as nn

from layerkit.base_layer import BaseLayer
from layerkit.checks import check_same_shape
from layerkit.config import sub_config_field
from layerkit.field_checks import Conditions
from layerkit.layers.attention.multi_head import MultiHeadAttention
from layerkit.layers.feed_forward import TransformerFeedForward
from layerkit.layers.masks import AttentionMask
from layerkit.layers.normalizations import LayerNorm
from layerkit.layers.remat import name_activation
from layerkit.layers.stochastic import Dropout, StochasticResidual
from layerkit.near_names import near_names

NORM_POLICIES = ("pre", "post", "pre_post", "branch")

_Branches = dict[str, Callable[[jax.Array], jax.Array]]


class Transformer(BaseLayer):
    """Attention and feed-forward, each around a residual: `[batch, length, dims]` → the same.

    Attributes:
      input_dims: Size of the model dimension.
      hidden_dims: Size of the feed-forward's wide dimension.
      num_heads: Query heads.
      num_kv_heads: Key and value heads; None for as many as query heads.
      dim_per_head: None for input_dims / num_heads.
      norm_tpl: The norms; there are as many as `norm_policy` asks for.
      norm_policy: Where they stand: `pre`, `post`, `pre_post` or `branch`, as above.
      parallel: All branches read the input of the layer, instead of each what the one before wrote.
      parallel_shares_norm: One norm before the parallel branches (GPT-J, PaLM), not one for each
        (GPT-NeoX).
      attention_tpl: Self-attention.
      cross_attention_tpl: Attention to a memory, after self-attention, in a decoder; None without.
      feed_forward_tpl: Dense or a mixture of experts.
      dropout_rate: Of every branch, in training.
      droppath_rate: Probability that training leaves a branch of an example out as a whole; see
        `StochasticResidual`.

    Raises:
      ValueError: an unknown `norm_policy`, or a combination that is not defined.
    """

    used_only_if: ClassVar[Conditions] = {"parallel_shares_norm": "parallel"}

    input_dims: int = 0
    hidden_dims: int = 0
    num_heads: int = 0
    num_kv_heads: int | None = None
    dim_per_head: int | None = None
    norm_tpl: Any = sub_config_field(LayerNorm.HParams)
    norm_policy: str = "pre"
    parallel: bool = False
    parallel_shares_norm: bool = False
    attention_tpl: Any = sub_config_field(MultiHeadAttention.HParams)
    cross_attention_tpl: Any = sub_config_field(None)
    feed_forward_tpl: Any = sub_config_field(TransformerFeedForward.HParams)
    dropout_rate: float = 0.0
    droppath_rate: float = 0.0

    def setup(self) -> None:
        self._check_fields()
        heads = {
            "input_dims": self.input_dims,
            "num_heads": self.num_heads,
            "num_kv_heads": self.num_kv_heads,
            "dim_per_head": self.dim_per_head,
        }
        wide = {"input_dims": self.input_dims, "hidden_dims": self.hidden_dims}
        self._create_branch("attention", self.attention_tpl, **heads)
        if self.cross_attention_tpl is not None:
            self._create_branch("cross_attention", self.cross_attention_tpl, **heads)
        self._create_branch("feed_forward", self.feed_forward_tpl, **wide)
        self.create_child("dropout", Dropout.HParams.config(rate=self.dropout_rate))
        self.create_child("residual", StochasticResidual.HParams.config(rate=self.droppath_rate))

    @nn.nowrap
    def _create_branch(self, name: str, template: Any, **sizes: Any) -> None:
        shares_norm = self.parallel_shares_norm and name != "attention"
        if self.norm_policy != "branch" and not shares_norm:
            self.create_child(f"{name}_norm", self.norm_tpl, dims=self.input_dims)
        self.create_child(name, template, **sizes)
        if self.norm_policy in ("pre_post", "branch"):
            self.create_child(f"{name}_post_norm", self.norm_tpl, dims=self.input_dims)

    def fprop(
        self,
        x: jax.Array,
        *,
        mask: AttentionMask,
        positions: jax.Array,
        bias: jax.Array | None = None,
        memory: jax.Array | None = None,
        memory_mask: AttentionMask | None = None,
        droppath_rate: jax.Array | None = None,
    ) -> jax.Array:
        """The layer on whole rows.

        Args:
          x: `[batch, length, dims]`.
          mask: Which position may attend which.
          positions: int32 `[batch, length]`, for a rotation.
          bias: float32 `[batch or 1, heads, length, length]`, added to the logits of attention.
          memory: `[batch, memory_length, memory_dims]`, for cross attention.
          memory_mask: Which position may attend which of the memory.
          droppath_rate: float32 scalar, instead of the field, from a stack whose rates differ.

        Returns:
          `[batch, length, dims]` in the compute dtype.

        Raises:
          ValueError: cross attention without memory and mask, or these without cross attention.
        """
        self._check_memory(memory=memory, memory_mask=memory_mask)
        if droppath_rate is not None and self.droppath_rate:
            raise ValueError(
                f"{self.path_name}: droppath_rate={self.droppath_rate} is set here, and its stack"
                " gives each layer a rate of its own; set one of the two"
            )
        attention = partial(self.attention, mask=mask, positions=positions, **given(bias=bias))
        branches: _Branches = {"attention": attention}
        if self.cross_attention_tpl is not None:
            branches["cross_attention"] = partial(
                self.cross_attention, memory=memory, mask=memory_mask
            )
        segments = mask.query_segments
        is_token = None if segments is None else segments != 0
        branches["feed_forward"] = partial(self.feed_forward, **given(is_token=is_token))
        return self._add_branches(x, branches, droppath_rate=droppath_rate)

    def init_cache(self, batch_size: int, max_length: int, memory: jax.Array | None = None) -> None:
        """Creates an empty cache of keys and values.

        Args:
          batch_size: Rows.
          max_length: Tokens of a row.
          memory: `[batch, memory_length, memory_dims]`, whose keys and values are computed now.
        """
        self._check_memory(memory=memory)
        self.attention.init_cache(batch_size, max_length)
        if self.cross_attention_tpl is not None:
            self.cross_attention.init_cache(memory)

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
        """The layer on the next positions of a cached sequence.

        Args:
          x: `[batch, t, dims]`.
          time_step: int32 scalar, how many tokens the cache holds.
          positions: int32 `[batch, t]`, for a rotation.
          bias: float32 `[batch or 1, heads, t, max_length]`, added to the logits of attention.
          memory_mask: Which of the t positions may attend which of the memory.
          prefix_lengths: int32 `[batch]`, how many tokens from the first on see one another, in a
            prefix language model; the first step must bring them all. None for none.

        Returns:
          `[batch, t, dims]` in the compute dtype.
        """
        self._check_memory(memory_mask=memory_mask)
        step = partial(self.attention.extend_step, time_step=time_step, positions=positions)
        branches: _Branches = {
            "attention": partial(step, **given(bias=bias, prefix_lengths=prefix_lengths))
        }
        if self.cross_attention_tpl is not None:
            branches["cross_attention"] = partial(
                self.cross_attention.extend_step, mask=memory_mask
            )
        branches["feed_forward"] = self.feed_forward
        return self._add_branches(x, branches)

    @nn.nowrap
    def _add_branches(
        self, x: jax.Array, branches: _Branches, *, droppath_rate: jax.Array | None = None
    ) -> jax.Array:
        x = name_activation(self.cast(x), "residual")
        source = x
        if self.parallel_shares_norm:
            source = self.attention_norm(x)
        for name, branch in branches.items():
            output = self._branch(name, branch, source if self.parallel else x)
            x = self.residual(x, output, rate=droppath_rate)
            if self.norm_policy == "post":
                x = getattr(self, f"{name}_norm")(x)
            x = self.constrain(x, "batch", "length", "act_embed")
        return x

    @nn.nowrap
    def _branch(
        self, name: str, branch: Callable[[jax.Array], jax.Array], x: jax.Array
    ) -> jax.Array:
        """What a branch adds to the residual, with the norms that stand within it."""
        if self.norm_policy in ("pre", "pre_post") and not self.parallel_shares_norm:
            x = getattr(self, f"{name}_norm")(x)
        output = branch(x)
        check_same_shape(getattr(self, name), x, outputs=output)
        output = name_activation(output, f"{name}_out")
        if self.norm_policy in ("pre_post", "branch"):
            output = getattr(self, f"{name}_post_norm")(output)
        return self.dropout(output)

    @nn.nowrap
    def _check_fields(self) -> None:
        if self.norm_policy not in NORM_POLICIES:
            raise ValueError(
                f"{self.path_name}: norm_policy={self.norm_policy!r} is not a policy"
                f"{near_names(str(self.norm_policy), NORM_POLICIES)}"
                f" Policies: {', '.join(NORM_POLICIES)}."
            )
        if self.parallel and self.norm_policy == "post":
            raise ValueError(
                f"{self.path_name}: parallel=True with norm_policy='post' is not defined, since the"
                " norm of one branch would be the input of the next; use another norm_policy"
            )
        if self.parallel and self.cross_attention_tpl is not None:
            raise ValueError(
                f"{self.path_name}: parallel=True with cross_attention_tpl is not defined, since"
                " cross attention asks with what self-attention found; leave one of them out"
            )
        if self.parallel_shares_norm and self.norm_policy == "branch":
            raise ValueError(
                f"{self.path_name}: parallel_shares_norm=True with norm_policy='branch', which has"
                " no norm before the branches to share; use 'pre' or 'pre_post'"
            )

    @nn.nowrap
    def _check_memory(self, **arguments: Any) -> None:
        """Refuses a memory that nobody would read, or one that is missing."""
        reads = self.cross_attention_tpl is not None
        for name, value in arguments.items():
            if reads and value is None:
                raise ValueError(f"{self.path_name}: cross attention needs {name}, which is None")
            if not reads and value is not None:
                raise ValueError(
                    f"{self.path_name}: {name} is given, but nothing reads it; set"
                    " cross_attention_tpl"
                )


def given(**arguments: Any) -> dict[str, Any]:
    """The arguments that are not None: a layer that cannot take the others need not know them."""
    return {name: value for name, value in arguments.items() if value is not None}
