"""Token embeddings, and softmax layers that compute logits and losses.

`Embedding` looks up vectors by token id; `FullSoftmax` computes logits and losses of hidden states;
`SharedEmbeddingSoftmax` does both with one (tied) weight. `ClassSoftmax` is the base class of the
last two: float32 logits with an optional bias and soft cap, and the losses of
`layerkit.ops.losses.softmax`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from operator import truediv
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from layerkit.base.base_layer import BaseLayer
from layerkit.base.weights import WeightHParams, WeightInit
from layerkit.config.checks import (
    check_integer_arrays,
    check_last_axis,
    check_non_negative,
    check_positive,
    check_rates,
    check_sizes,
    require,
)
from layerkit.config.hparams import Conditions
from layerkit.config.nested_map import NestedMap
from layerkit.layers.basic.dots import merge_tokens
from layerkit.ops.losses.linear import TokenChunks, class_logits, map_logits
from layerkit.ops.losses.softmax import (
    TokenLosses,
    cross_entropy,
    soft_cross_entropy,
    weighted_mean,
)
from layerkit.ops.soft_cap import soft_cap

_LOG = logging.getLogger(__name__)
# In bytes. In smaller chunks, GPUs would spend a larger share of the time on the gradient of the
# class vectors, which is read and written by each chunk.
_LARGEST_LOGITS = 2**30


def lookup(table: jax.Array, ids: jax.Array) -> jax.Array:
    """Return the rows of a table that have the given ids.

    Args:
      table: `[num_classes, dims]`; its first axis may be sharded.
      ids: Integers `[...]` in [0, num_classes). The row of any other id is NaN.

    Returns:
      `[..., dims]` in the dtype of the table.
    """
    # The gradient of a row is a sum over all uses of the row. A bfloat16 sum stops growing at 256
    # terms of equal size, so the sum is computed in float32 and rounded once.
    rows = table.astype(jnp.promote_types(table.dtype, jnp.float32)).at[ids]
    vectors = rows.get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)
    return vectors.astype(table.dtype)


def _class_vector_hparams(layer: Embedding | SharedEmbeddingSoftmax) -> WeightHParams:
    """Declare one vector for each class, by default normal with standard deviation 1/√dims.

    Such vectors have unit length: scaled by √dims they have unit variance, and as class vectors
    they give unit-variance logits for unit-variance hidden states.
    """
    init = layer.weight_init
    if init is None and layer.inherited("params_init") is None:
        init = WeightInit.Gaussian(1.0 / math.sqrt(layer.input_dims))
    shape = (layer.num_classes, layer.input_dims)
    return WeightHParams(shape, axes=layer.weight_axes, init=init, decays=True)


def _embed(
    layer: Embedding | SharedEmbeddingSoftmax, ids: jax.Array, axes: tuple[str | None, ...] | None
) -> jax.Array:
    check_integer_arrays(layer, ids=ids)
    sharding = layer.inherited("sharding")
    if axes is not None and sharding is not None and sharding.is_split(axes[-1]):
        # Each device looks up its shard of the features of every id, since whole vectors of all
        # tokens would be too large.
        vocab, features = None, axes[-1]
    else:
        # Each device holds whole vectors of its shard of the vocabulary. Otherwise the compiler
        # keeps the layout of the weight, and every device looks up the ids of all rows.
        vocab, features = layer.weight_axes[0], None
    table = layer.constrain(layer.theta.w, vocab, features, gradient_axes=layer.weight_axes)
    vectors = lookup(table, ids)
    if layer.scale_by_sqrt_dims:
        vectors *= math.sqrt(layer.input_dims)
    return vectors if axes is None else layer.constrain(vectors, *axes)


class Embedding(BaseLayer):
    """An embedding: a learned vector for each token id.

    Attributes:
      num_classes: Size of the vocabulary.
      input_dims: Size of a vector. The name is that of Pax.
      scale_by_sqrt_dims: True to multiply the vectors by √input_dims, as in the original
        Transformer (arXiv:1706.03762) and Gemma.
      weight_axes: Logical axes of `w`.
      activation_axes: Logical axes of the output; None leaves its layout to the compiler.
      weight_init: Initializer of `w`; None for the inherited `params_init`, or else normal with
        standard deviation 1/√input_dims.
    """

    num_classes: int = 0
    input_dims: int = 0
    scale_by_sqrt_dims: bool = False
    weight_axes: tuple[str | None, ...] = ("vocab", "embed")
    activation_axes: tuple[str | None, ...] | None = ("batch", "length", "act_embed")
    weight_init: WeightInit | None = None

    def setup(self) -> None:
        """Create the vectors."""
        check_sizes(self, num_classes=self.num_classes, input_dims=self.input_dims)
        self.create_variable("w", _class_vector_hparams(self))

    def fprop(self, ids: jax.Array) -> jax.Array:
        """Look up ids `[batch, length]`: vectors `[batch, length, input_dims]`.

        The vector of an id outside [0, num_classes) is NaN.
        """
        return _embed(self, ids, self.activation_axes)


class ClassSoftmax(BaseLayer):
    """The base class of softmax layers; a subclass defines the class vectors.

    Attributes:
      input_dims: Size of a hidden state.
      num_classes: Size of the vocabulary.
      use_bias: True if each class has a bias `b`.
      logit_scale: Factor of the products with the class vectors (T5 with tied weights: 1/√dims);
        None for 1.
      logit_soft_cap: Bound of the logits, applied as cap·tanh(logits/cap); None for no bound.
      label_smoothing: Label smoothing of `loss`; see `losses.cross_entropy`. `xent` has none.
      z_loss_weight: Weight of the z-loss in `loss`; see `losses.cross_entropy`.
      entropy_loss_weight: Weight of the negative entropy of the predictions in `loss`; see
        `losses.cross_entropy`.
      chunk_size: Number of positions of each row whose logits are in memory at once while the loss
        is computed; None for as many as have logits of at most 1 GiB per device. Chunks cost no
        further product with `w`, except for losses with a gradient of each token of its own, such
        as those of preferences, which compute the logits twice. Use few large chunks. Their loss
        has no `jax.jvp`, but its gradient has one.
      weight_axes: Logical axes of `w`.
      bias_axes: Logical axes of `b`.
      activation_axes: Logical axes of the logits; None leaves their layout to the compiler.
      weight_init: Initializer of `w`.

    Raises:
      ConfigError: An option is out of range.
    """

    used_only_if: ClassVar[Conditions] = {"bias_axes": "use_bias"}

    input_dims: int = 0
    num_classes: int = 0
    use_bias: bool = False
    logit_scale: float | None = None
    logit_soft_cap: float | None = None
    label_smoothing: float = 0.0
    z_loss_weight: float = 0.0
    entropy_loss_weight: float = 0.0
    chunk_size: int | None = None
    weight_axes: tuple[str | None, ...] = ("embed", "vocab")
    bias_axes: tuple[str | None, ...] = ("vocab",)
    activation_axes: tuple[str | None, ...] | None = ("batch", "length", "act_vocab")
    weight_init: WeightInit | None = None

    def setup(self) -> None:
        """Create the class vectors and the bias."""
        check_sizes(self, input_dims=self.input_dims, num_classes=self.num_classes)
        check_sizes(self, chunk_size=self.chunk_size)
        check_positive(self, logit_scale=self.logit_scale, logit_soft_cap=self.logit_soft_cap)
        check_rates(self, label_smoothing=self.label_smoothing)
        check_non_negative(self, z_loss_weight=self.z_loss_weight)
        self.create_variable("w", self.class_weight_hparams())
        if self.use_bias:
            zeros = WeightInit.Constant(0.0)
            self.create_variable(
                "b", WeightHParams((self.num_classes,), axes=self.bias_axes, init=zeros)
            )

    def class_weight_hparams(self) -> WeightHParams:
        """Return the declaration of `w`."""
        raise NotImplementedError(f"{type(self).__qualname__} does not define class_weight_hparams")

    def class_vectors(self) -> jax.Array:
        """Return `w` as `[num_classes, input_dims]`."""
        raise NotImplementedError(f"{type(self).__qualname__} does not define class_vectors")

    @property
    def vector_axes(self) -> tuple[str | None, ...]:
        """Logical axes of `class_vectors`."""
        raise NotImplementedError(f"{type(self).__qualname__} does not define vector_axes")

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Map `[batch, length, input_dims]` to float32 logits `[batch, length, num_classes]`."""
        return self.project(hidden, self.head())

    def fprop(
        self,
        hidden: jax.Array,
        labels: jax.Array | None = None,
        weights: jax.Array | None = None,
        *,
        class_probabilities: jax.Array | None = None,
    ) -> NestedMap:
        """Compute the loss of each token and the weighted means.

        Args:
          hidden: `[batch, length, input_dims]`.
          labels: Integers `[batch, length]`. The loss of a label outside [0, num_classes) is NaN,
            which the means ignore if the weight is 0.
          weights: `[batch, length]`, at least 0; 0 for positions without a target. None for 1.
          class_probabilities: Soft targets `[batch, length, num_classes]` in the place of labels,
            without gradients.

        Returns:
          A NestedMap; losses are in nats, float32:
            xent: Weighted mean of `per_token_xent`, for reports; a scalar, 0 if all weights are 0.
            loss: Weighted mean of `per_token_loss`, for training; a scalar, 0 if all weights are 0.
            total_weight: Sum of the weights; a float32 scalar.
            per_token_xent: −log p(label), `[batch, length]`.
            per_token_loss: Loss of each token with label smoothing, z-loss and entropy loss,
              `[batch, length]`.
            correct: True where the label has the highest logit, bool `[batch, length]`.

        Raises:
          ConfigError: Labels and class_probabilities are both given or both missing, or label
            smoothing is set with class_probabilities.
        """
        is_soft = class_probabilities is not None
        expected = "None with class_probabilities" if is_soft else "integers or class_probabilities"
        shape_of_labels = None if labels is None else list(labels.shape)
        require(is_soft == (labels is None), self, "labels", shape_of_labels, expected)
        if weights is None:
            weights = jnp.ones(hidden.shape[:-1], jnp.float32)
        if is_soft:
            expected, smoothing = "0 with class_probabilities", self.label_smoothing
            require(not smoothing, self, "label_smoothing", smoothing, expected)
        targets = class_probabilities if is_soft else labels
        loss, (losses, _) = self._map_losses(hidden, weights, targets, is_soft=is_soft)
        if self.z_loss_weight:
            self.add_summary("z_loss", weighted_mean(losses.z_loss, weights))
        return NestedMap(
            xent=weighted_mean(losses.xent, weights),
            loss=loss,
            total_weight=jnp.sum(weights.astype(jnp.float32)),
            per_token_xent=losses.xent,
            per_token_loss=losses.loss,
            correct=losses.correct,
        )

    def head(self) -> tuple[jax.Array, jax.Array | None]:
        """Return the vectors of the classes `[num_classes, input_dims]`, and the bias if any."""
        return self.class_vectors(), self.theta.b if self.use_bias else None

    def project(self, hidden: jax.Array, head: tuple[jax.Array, jax.Array | None]) -> jax.Array:
        """Map `[..., input_dims]` to `logits` `[..., num_classes]` with the weights of `head`.

        This method works also where Flax's layers cannot be called, such as in a loop of JAX.
        """
        return self._finish(self._multiply(hidden, head))

    def token_losses(
        self,
        hidden: jax.Array,
        labels: jax.Array,
        compare: Callable[..., Any],
        *arrays: jax.Array,
    ) -> tuple[TokenLosses, Any]:
        """Compute the cross-entropy of each token, and another function of the logits.

        Args:
          hidden: `[batch, length, input_dims]`.
          labels: Integers `[batch, length]`.
          compare: Function of the logits and `arrays`, which computes each position separately. It
            and what it closes over have no gradients except by the logits.
          *arrays: Arrays `[batch, length, ...]`, which are split into chunks as the logits are.
        """
        weights = jnp.ones(labels.shape, jnp.float32)
        return self._map_losses(hidden, weights, labels, *arrays, compare=compare)[1]

    def _map_losses(
        self,
        hidden: jax.Array,
        weights: jax.Array,
        *arrays: Any,
        is_soft: bool = False,
        compare: Callable[..., Any] = lambda logits: None,
    ) -> tuple[jax.Array, tuple[TokenLosses, Any]]:
        """Return the weighted mean of the losses, and the results of `token_losses`.

        The first of `arrays` are the labels, or soft targets if `is_soft`.
        """
        names = ("label_smoothing", "z_loss_weight", "entropy_loss_weight")
        options = {name: getattr(self, name) for name in names[is_soft:]}

        def compute(products: jax.Array, targets: jax.Array, *arrays: Any) -> Any:
            logits = self._finish(products)
            losses = (soft_cross_entropy if is_soft else cross_entropy)(logits, targets, **options)
            return losses.loss, (losses, compare(logits, *arrays))

        def run_whole(hidden: jax.Array, head: Any, weights: jax.Array, *arrays: Any) -> Any:
            losses, outputs = compute(self._multiply(hidden, head), *arrays)
            return weighted_mean(losses, weights), outputs

        chunks, inputs = self._chunks(hidden), (hidden, self.head(), weights, *arrays)
        if chunks.num_chunks == 1:
            loss, outputs = run_whole(*inputs)
            return loss, outputs
        # Padding of chunks would hide wrong lengths.
        jax.eval_shape(run_whole, *inputs)
        weights = weights.astype(jnp.float32)
        total = jnp.sum(weights)
        shares = weights / jnp.where(total > 0, total, 1.0)
        hidden = self._scale(hidden)
        return map_logits(compute, hidden, self.head(), shares, *arrays, chunks=chunks)

    def _chunks(self, hidden: jax.Array) -> TokenChunks:
        """Return the split of the tokens, and log it if there are several chunks."""
        chunks, sharding = TokenChunks(), self.inherited("sharding")
        if hidden.ndim != 3:
            return chunks
        if sharding is not None and self.activation_axes is not None:
            chunks = TokenChunks(1, self.activation_axes, self.vector_axes, sharding)
        length, shape = hidden.shape[1], (*hidden.shape[:2], self.num_classes)
        num_bytes = 4 * math.prod(map(math.ceil, map(truediv, shape, chunks.shards)))
        count = math.ceil(num_bytes / _LARGEST_LOGITS)
        if self.chunk_size is not None:
            count = math.ceil(length / self.chunk_size)
        count = max(1, min(count, length // chunks.shards[1]))
        if count > 1:
            positions, size = math.ceil(length / count), num_bytes / 1e9
            reason = "auto: above 1.1 GB" if self.chunk_size is None else "chunk_size"
            _LOG.info(f"logits: {size:.1f} GB, {count} chunks of {positions} positions ({reason})")
        return chunks._replace(num_chunks=count)

    def _multiply(self, hidden: jax.Array, head: tuple[jax.Array, jax.Array | None]) -> jax.Array:
        tokens, (vectors, bias) = merge_tokens(self, self._scale(hidden)), head
        axes = self.vector_axes
        vectors = self.constrain(self.cast(vectors), axes[0], None, gradient_axes=axes)
        products = class_logits(tokens, vectors)
        products = products.reshape(*hidden.shape[:-1], self.num_classes)
        return products if bias is None else products + bias.astype(jnp.float32)

    def _scale(self, hidden: jax.Array) -> jax.Array:
        check_last_axis(self, hidden, input_dims=self.input_dims)
        hidden = self.cast(hidden)
        return hidden if self.logit_scale is None else hidden * self.logit_scale

    def _finish(self, logits: jax.Array) -> jax.Array:
        """Constrain and cap products with the head, `[..., num_classes]`."""
        if self.activation_axes is not None:
            *names, classes = self.activation_axes
            names += [None] * (logits.ndim - len(self.activation_axes))
            logits = self.constrain(logits, *names, classes)
        return soft_cap(logits, self.logit_soft_cap)


class FullSoftmax(ClassSoftmax):
    """A softmax layer with a separate weight `w` `[input_dims, num_classes]`.

    `weight_init=None` means the inherited `params_init`, or else Xavier.
    """

    def class_weight_hparams(self) -> WeightHParams:
        """Return the declaration of `w`."""
        shape = (self.input_dims, self.num_classes)
        return WeightHParams(shape, axes=self.weight_axes, init=self.weight_init, decays=True)

    def class_vectors(self) -> jax.Array:
        """Return `w` as `[num_classes, input_dims]`."""
        return self.theta.w.T

    @property
    def vector_axes(self) -> tuple[str | None, ...]:
        """Logical axes of `class_vectors`."""
        return self.weight_axes[::-1]


class SharedEmbeddingSoftmax(ClassSoftmax):
    """An embedding and a softmax layer with one (tied) weight `w` `[num_classes, input_dims]`.

    Source: Press and Wolf, 2017 (arXiv:1608.05859).

    Attributes:
      scale_by_sqrt_dims: True to multiply embedded vectors, but not logits, by √input_dims.
      embedding_axes: Logical axes of embedded vectors; None leaves their layout to the compiler.
      weight_init: Initializer of `w`; None for the inherited `params_init`, or else normal with
        standard deviation 1/√input_dims.
    """

    scale_by_sqrt_dims: bool = False
    weight_axes: tuple[str | None, ...] = ("vocab", "embed")
    embedding_axes: tuple[str | None, ...] | None = ("batch", "length", "act_embed")

    def class_weight_hparams(self) -> WeightHParams:
        """Return the declaration of `w`."""
        return _class_vector_hparams(self)

    def class_vectors(self) -> jax.Array:
        """Return `w`, `[num_classes, input_dims]`."""
        return self.theta.w

    @property
    def vector_axes(self) -> tuple[str | None, ...]:
        """Logical axes of `class_vectors`."""
        return self.weight_axes

    def embed(self, ids: jax.Array) -> jax.Array:
        """Look up ids `[batch, length]` as `Embedding` does."""
        return _embed(self, ids, self.embedding_axes)
