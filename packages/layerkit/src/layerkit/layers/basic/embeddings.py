"""Token embeddings, and softmax layers that compute logits and losses.

`Embedding` looks up vectors by token id; `FullSoftmax` computes logits and losses of hidden states;
`SharedEmbeddingSoftmax` does both with one (tied) weight. `ClassSoftmax` is the base class of the
last two: float32 logits with an optional bias and soft cap, and the losses of
`layerkit.ops.losses`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
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
from layerkit.ops.losses import (
    TokenLosses,
    cross_entropy,
    map_chunks,
    soft_cap,
    soft_cross_entropy,
    weighted_mean,
)

# From this size on, the logits of a row of 2048 take half a gigabyte, and as much again for their
# gradient. Models with such a vocabulary have a billion weights and more, so that computing the
# logits twice adds a few per cent to a step.
_LARGE_VOCABULARY = 65_536
_DEFAULT_CHUNK = 512


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


@jax.custom_jvp
def class_logits(hidden: jax.Array, weight: jax.Array) -> jax.Array:
    """Multiply hidden states by the vector of every class, accumulated in float32.

    Args:
      hidden: `[..., dims]`.
      weight: `[num_classes, dims]` in the dtype of `hidden`.

    Returns:
      Logits `[..., num_classes]`, float32.
    """
    return jnp.einsum("...d,vd->...v", hidden, weight, preferred_element_type=jnp.float32)


# JAX would multiply the float32 gradient of bfloat16 logits by bfloat16 operands, which no
# accelerator does at full speed. This derivative has the dtype of the operands, so the backward
# pass rounds the gradient to that dtype first.
@class_logits.defjvp
def _class_logits_jvp(
    primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    (hidden, weight), (hidden_dot, weight_dot) = primals, tangents
    tangent = jnp.einsum("...d,vd->...v", hidden_dot, weight)
    tangent += jnp.einsum("...d,vd->...v", hidden, weight_dot)
    return class_logits(hidden, weight), tangent.astype(jnp.float32)


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
        table = layer.constrain(layer.theta.w, None, axes[-1])
    else:
        # Each device holds whole vectors of its shard of the vocabulary. Otherwise the compiler
        # keeps the layout of the weight, and every device looks up the ids of all rows.
        table = layer.constrain(layer.theta.w, layer.weight_axes[0], None)
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
        is computed; None for 512 from 65,536 classes on, and for all below. Chunks save memory;
        they cost computing the logits twice and, on a mesh, one reduction of the gradient of `w`
        per chunk. Use few large chunks. A row that fits in one chunk costs nothing more.
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

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Map `[batch, length, input_dims]` to float32 logits `[batch, length, num_classes]`."""
        return self.projection()(hidden)

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
          class_probabilities: Soft targets `[batch, length, num_classes]` in the place of labels.
            The logits of all positions are then in memory at once, whatever `chunk_size` is.

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
        if class_probabilities is None:
            assert labels is not None
            losses, _ = self.token_losses(hidden, labels)
        else:
            expected, smoothing = "0 with class_probabilities", self.label_smoothing
            require(not smoothing, self, "label_smoothing", smoothing, expected)
            losses = soft_cross_entropy(
                self.logits(hidden),
                class_probabilities,
                z_loss_weight=self.z_loss_weight,
                entropy_loss_weight=self.entropy_loss_weight,
            )
        if weights is None:
            weights = jnp.ones(hidden.shape[:-1], jnp.float32)
        if self.z_loss_weight:
            self.add_summary("z_loss", weighted_mean(losses.z_loss, weights))
        return NestedMap(
            xent=weighted_mean(losses.xent, weights),
            loss=weighted_mean(losses.loss, weights),
            total_weight=jnp.sum(weights.astype(jnp.float32)),
            per_token_xent=losses.xent,
            per_token_loss=losses.loss,
            correct=losses.correct,
        )

    def projection(self, dtype: Any = None) -> Callable[[jax.Array], jax.Array]:
        """Return the function `logits`, with the weights of this layer.

        It maps `[batch, length, input_dims]` to `[batch, length, num_classes]` also where Flax's
        layers cannot be called, such as in a loop of JAX.

        Args:
          dtype: Dtype of the weights, in which chunks sum gradients; None for theirs.
        """
        bias = self.theta.b if self.use_bias else None
        weights = {"vectors": self.class_vectors(), "bias": bias}
        return partial(self._project, **jax.tree.map(lambda x: x.astype(dtype or x.dtype), weights))

    def token_losses(
        self,
        hidden: jax.Array,
        labels: jax.Array,
        compare: Callable[..., Any] = lambda logits: None,
        *arrays: jax.Array,
    ) -> tuple[TokenLosses, Any]:
        """Compute the cross-entropy of each token, and another function of the logits.

        Args:
          hidden: `[batch, length, input_dims]`.
          labels: Integers `[batch, length]`.
          compare: Function of the logits and `arrays`, which computes each position separately.
          *arrays: Arrays `[batch, length, ...]`, which are split into chunks as the logits are.
        """
        chunk_size = self.chunk_size
        if chunk_size is None and self.num_classes >= _LARGE_VOCABULARY:
            chunk_size = _DEFAULT_CHUNK
        names = ("label_smoothing", "z_loss_weight", "entropy_loss_weight")
        options = {name: getattr(self, name) for name in names}

        def losses_of(project: Any, hidden: jax.Array, labels: jax.Array, *arrays: Any) -> Any:
            logits = project(hidden)
            return cross_entropy(logits, labels, **options), compare(logits, *arrays)

        if chunk_size is None or hidden.ndim != 3 or hidden.shape[1] <= chunk_size:
            return losses_of(self.projection(), hidden, labels, *arrays)
        # float32, because the gradients of the chunks are summed in this dtype.
        run = partial(losses_of, self.projection(jnp.float32))
        return map_chunks(run, hidden, labels, *arrays, chunk_size=chunk_size)

    def _project(self, hidden: jax.Array, vectors: jax.Array, bias: jax.Array | None) -> jax.Array:
        check_last_axis(self, hidden, input_dims=self.input_dims)
        tokens = merge_tokens(self, self.cast(hidden))
        if self.logit_scale is not None:
            tokens = tokens * self.logit_scale
        logits = class_logits(tokens, self.cast(vectors))
        logits = logits.reshape(*hidden.shape[:-1], self.num_classes)
        if self.activation_axes is not None:
            logits = self.constrain(logits, *self.activation_axes)
        if bias is not None:
            logits += bias.astype(jnp.float32)
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
        return self.constrain(self.theta.w.T, self.weight_axes[1], None)


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
        return self.constrain(self.theta.w, self.weight_axes[0], None)

    def embed(self, ids: jax.Array) -> jax.Array:
        """Look up ids `[batch, length]` as `Embedding` does."""
        return _embed(self, ids, self.embedding_axes)
