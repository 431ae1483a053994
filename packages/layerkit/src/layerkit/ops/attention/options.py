"""The options of `dot_product_attention` as one value."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

import jax

from layerkit.base.sharding import BoundSharding, model_device
from layerkit.ops.attention.backends import BackendName
from layerkit.ops.attention.distance_bias import DistanceBias, LogitBias
from layerkit.ops.attention.masks import AttentionMask

ContextParallel = Literal["all_gather", "ring", "ulysses"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionOptions:
    """How queries attend to keys, and what computes it.

    Attributes:
      scale: Factor of the products of queries and keys.
      mask: Mask of the (query, key) pairs that may attend; None for all pairs.
      bias: `[batch or 1, heads or 1, queries, keys]`, or a bias by distance for a mask in row
        order, added to the scaled products before the cap.
      sinks: `[heads]`, a logit per head that takes probability and adds no value (attention sinks;
        Xiao et al., 2023, arXiv:2309.17453, learned as in gpt-oss). It is not capped.
      logit_cap: Bound of the logits, which tanh squeezes into ±logit_cap; None for no bound.
      dropout: Function that drops probabilities, applied in the dtype of the values.
      zero_fully_masked_rows: True for an output of exactly 0 where a query may attend no key;
        otherwise it is the mean of all values, or 0 in kernels. With `sinks`, which then take all
        probability, it is 0 in all cases.
      backend: `auto`, `xla`, `cudnn` or `pallas`; see `layerkit.ops.attention.backends`.
      platform: JAX's name of the platform that runs it; "" for that of the mesh, of `sharding` or
        of a surrounding `jax.shard_map`, or without a mesh JAX's default.
      sharding: Sharding of the model for attention of whole rows: kernels run on the rows and
        heads of each device, and `context_parallel` applies to rows that are split over devices.
        None leaves the split to the compiler, as is best for cached steps.
      context_parallel: `all_gather`, `ring` or `ulysses`; see
        `layerkit.ops.attention.context_parallel`. It has an effect if the rule of `length`
        splits rows.
      kernel_blocks: Largest number of (queries, keys) in a block of a Pallas kernel, powers of two
        of at least 16, and 128 on TPUs; None for the kernel's own.
      interpret: True to run the Pallas kernel of `platform` in interpret mode on any device. This
        is slow and meant for tests.
    """

    scale: float = 1.0
    mask: AttentionMask | None = None
    bias: LogitBias | None = None
    sinks: jax.Array | None = None
    logit_cap: float | None = None
    dropout: Callable[[jax.Array], jax.Array] | None = None
    zero_fully_masked_rows: bool = False
    backend: BackendName = "auto"
    platform: str = ""
    sharding: BoundSharding | None = None
    context_parallel: ContextParallel = "all_gather"
    kernel_blocks: tuple[int, int] | None = None
    interpret: bool = False

    def __post_init__(self) -> None:
        """Set the platform."""
        if not self.platform:
            platform = str(model_device(self.sharding).platform)
            object.__setattr__(self, "platform", platform)

    @property
    def num_length_shards(self) -> int:
        """Number of devices over which the length of a row is split."""
        return 1 if self.sharding is None else self.sharding.num_shards("length")

    @property
    def dense_bias(self) -> jax.Array | None:
        """The bias as an array `[batch or 1, heads or 1, queries, keys]`; None without a bias."""
        return self.bias.dense() if isinstance(self.bias, DistanceBias) else self.bias
