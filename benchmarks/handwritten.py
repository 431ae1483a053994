"""A decoder-only language model and its training step, written by hand in JAX and Optax.

The benchmarks compare the framework with this file: `benchmarks/step.py` runs both side by side,
and `benchmarks/startup.py` uses it as the baseline program. It imports nothing of the project. It
is written for speed and clarity: parameters stacked by layer, one `lax.scan` over the layers, and
one jitted step that donates its state.

The model: pre-norm decoder layers with RMSNorm, rotary positions, multi-head or grouped-query
causal attention within each packed document, a gated SiLU feed-forward, no biases, and an
embedding that is also the output projection.

A batch is a dict of arrays `[batch, length]`:

    ids, labels   int32     tokens, and the next token of each
    weights       float32   weight of each label in the loss; 0 on padding
    segment_ids   int32     one-based document number within the row; 0 is padding
    segment_pos   int32     zero-based position within the document

Letters in the einsum strings: b batch, l and m length (of queries, of keys), t tokens (batch times
length), d model dims, k key-value heads, g query heads per key-value head, h head dims,
v vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

Params = dict[str, Any]
Batch = dict[str, jax.Array]
TrainStep = Callable[[Params, optax.OptState, Batch], tuple[Params, optax.OptState, jax.Array]]


@dataclasses.dataclass(frozen=True)
class Config:
    """The sizes and the computation options of a model.

    Attributes:
      vocab_size: Number of token ids.
      dims: Width of the residual stream.
      num_layers: Number of decoder layers.
      num_heads: Number of query heads.
      num_kv_heads: Number of key and value heads; it divides `num_heads`. None means `num_heads`.
      head_dims: Width of one head, even. None means `dims // num_heads`.
      mlp_dims: Width of the gated feed-forward layer.
      rope_timescale: Base of the rotary timescales. Pair i of a head is rotated by
        `position / rope_timescale ** (2 * i / head_dims)` radians.
      scale_embedding: Whether embedded tokens are multiplied by the square root of `dims`.
      embedding_stddev: Standard deviation of the initial embedding. None means `dims ** -0.5`.
      norm_epsilon: Constant added to the mean square in RMSNorm.
      compute_dtype: Dtype of the activations and matrix products. Parameters, norms, both
        softmaxes and the loss are float32.
      remat: Whether the backward pass recomputes each layer instead of storing its activations.
        On a CPU this can be faster, because allocating memory costs more than arithmetic.
      remat_policy: One of `jax.checkpoint_policies`, which selects the values to store with
        `remat`. None stores only the inputs of each layer.
      loss_chunk: Number of tokens per chunk of the logits and the loss, which limits their memory.
        It divides batch times length. None means one chunk.
    """

    vocab_size: int
    dims: int
    num_layers: int
    num_heads: int
    mlp_dims: int
    num_kv_heads: int | None = None
    head_dims: int | None = None
    rope_timescale: float = 10_000.0
    scale_embedding: bool = False
    embedding_stddev: float | None = None
    norm_epsilon: float = 1e-6
    compute_dtype: Any = jnp.float32
    remat: bool = False
    remat_policy: Callable[..., Any] | None = None
    loss_chunk: int | None = None


def init_params(key: jax.Array, config: Config) -> Params:
    """Draw the float32 parameters. Those under `layers` have a leading `[layer]` axis.

    Weights are normal with variance 1/fan_in. The two projections into the residual stream are
    divided by sqrt(2 · num_layers) as in GPT-2, so its variance does not grow with depth.
    """
    layers, dims, mlp = config.num_layers, config.dims, config.mlp_dims
    heads, kv_heads, head = _head_sizes(config)
    keys = iter(jax.random.split(key, 8))

    def normal(shape: tuple[int, ...], stddev: float) -> jax.Array:
        return stddev * jax.random.normal(next(keys), shape, jnp.float32)

    stddev = dims**-0.5 if config.embedding_stddev is None else config.embedding_stddev
    depth = (2 * layers) ** -0.5
    return {
        "embedding": normal((config.vocab_size, dims), stddev),
        "final_norm": jnp.ones((dims,), jnp.float32),
        "layers": {
            "attention_norm": jnp.ones((layers, dims), jnp.float32),
            "query": normal((layers, dims, heads * head), dims**-0.5),
            "key": normal((layers, dims, kv_heads * head), dims**-0.5),
            "value": normal((layers, dims, kv_heads * head), dims**-0.5),
            "attention_out": normal((layers, heads * head, dims), depth * (heads * head) ** -0.5),
            "mlp_norm": jnp.ones((layers, dims), jnp.float32),
            "mlp_gate": normal((layers, dims, mlp), dims**-0.5),
            "mlp_up": normal((layers, dims, mlp), dims**-0.5),
            "mlp_down": normal((layers, mlp, dims), depth * mlp**-0.5),
        },
    }


def _head_sizes(config: Config) -> tuple[int, int, int]:
    """Return the numbers of query heads and of key-value heads, and the width of a head."""
    kv_heads = config.num_heads if config.num_kv_heads is None else config.num_kv_heads
    head = config.dims // config.num_heads if config.head_dims is None else config.head_dims
    if config.num_heads % kv_heads:
        raise ValueError(f"num_kv_heads={kv_heads}: expected a divisor of {config.num_heads}")
    if head % 2:
        raise ValueError(f"head_dims={head}: expected an even number")
    return config.num_heads, kv_heads, head


def token_losses(params: Params, batch: Batch, config: Config) -> jax.Array:
    """Return the cross-entropy of each label in nats, float32 `[batch, length]`, unweighted."""
    hidden = _decode_hidden(params, batch, config)
    embedding = params["embedding"].astype(config.compute_dtype)

    def cross_entropy(hidden: jax.Array, labels: jax.Array) -> jax.Array:
        logits = jnp.einsum("td,vd->tv", hidden, embedding, preferred_element_type=jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels)

    shape = batch["labels"].shape
    labels = batch["labels"].reshape(-1)
    if config.loss_chunk is None:
        return cross_entropy(hidden, labels).reshape(shape)
    if labels.size % config.loss_chunk:
        raise ValueError(f"loss_chunk={config.loss_chunk}: expected a divisor of {labels.size}")
    hidden = hidden.reshape(-1, config.loss_chunk, config.dims)
    labels = labels.reshape(-1, config.loss_chunk)
    losses = jax.lax.map(lambda chunk: jax.checkpoint(cross_entropy)(*chunk), (hidden, labels))
    return losses.reshape(shape)


def loss_fn(params: Params, batch: Batch, config: Config) -> jax.Array:
    """Return the mean cross-entropy in nats per label, weighted by `batch['weights']`."""
    weights = batch["weights"]
    return jnp.sum(token_losses(params, batch, config) * weights) / jnp.sum(weights)


def _decode_hidden(params: Params, batch: Batch, config: Config) -> jax.Array:
    """Return the output of the final norm, `[tokens, dims]`.

    Outside of attention the tokens of a batch form one axis, so that the backward pass has plain
    matrix products, too. For two contracted axes, XLA on a CPU first transposes both operands,
    which makes the feed-forward layer three times as slow.
    """
    dtype = config.compute_dtype
    hidden = params["embedding"][batch["ids"].reshape(-1)].astype(dtype)
    if config.scale_embedding:
        hidden = hidden * jnp.asarray(config.dims**0.5, dtype)
    # All layers share these, so they are computed outside of the scan.
    rotation = _rotation(batch["segment_pos"], config)
    mask = _attention_mask(batch["segment_ids"])

    def layer(hidden: jax.Array, weights: Params) -> tuple[jax.Array, None]:
        weights = {
            name: weight if "norm" in name else weight.astype(dtype)
            for name, weight in weights.items()
        }
        normed = _rms_norm(hidden, weights["attention_norm"], config)
        hidden = hidden + _attention(normed, weights, rotation, mask, config)
        normed = _rms_norm(hidden, weights["mlp_norm"], config)
        hidden = hidden + _gated_mlp(normed, weights)
        return hidden, None

    if config.remat:
        # XLA cannot merge the two computations inside a scan, so the barrier is not needed.
        layer = jax.checkpoint(layer, prevent_cse=False, policy=config.remat_policy)
    hidden, _ = jax.lax.scan(layer, hidden, params["layers"])
    return _rms_norm(hidden, params["final_norm"], config)


def _rms_norm(inputs: jax.Array, scale: jax.Array, config: Config) -> jax.Array:
    inputs32 = inputs.astype(jnp.float32)
    mean_square = jnp.mean(jnp.square(inputs32), axis=-1, keepdims=True)
    normed = inputs32 * jax.lax.rsqrt(mean_square + config.norm_epsilon)
    return (normed * scale).astype(inputs.dtype)


def _rotation(positions: jax.Array, config: Config) -> tuple[jax.Array, jax.Array]:
    """Return the sines and cosines of the rotary angles, each `[batch, 1, length, head / 2]`."""
    _, _, head = _head_sizes(config)
    exponents = jnp.arange(0, head, 2, dtype=jnp.float32) / head
    angles = positions[:, None, :, None] / config.rope_timescale**exponents
    return jnp.sin(angles), jnp.cos(angles)


def _rotate(heads: jax.Array, rotation: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotate each pair (i, i + head / 2) of `[batch, heads, length, head]` by its angle."""
    sin, cos = rotation
    first, second = jnp.split(heads.astype(jnp.float32), 2, axis=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate(turned, axis=-1).astype(heads.dtype)


def _attention_mask(segment_ids: jax.Array) -> jax.Array:
    """Return the attention mask, boolean `[batch, 1, 1, length, length]`."""
    length = segment_ids.shape[1]
    causal = jnp.tril(jnp.ones((length, length), jnp.bool_))
    same_segment = segment_ids[:, :, None] == segment_ids[:, None, :]
    return (causal & same_segment)[:, None, None]


def _attention(
    inputs: jax.Array,
    weights: Params,
    rotation: tuple[jax.Array, jax.Array],
    mask: jax.Array,
    config: Config,
) -> jax.Array:
    """Apply attention within documents: `[tokens, dims]` to `[tokens, dims]`."""
    batch, length = mask.shape[0], mask.shape[-1]
    heads, kv_heads, head = _head_sizes(config)

    def project(weight: jax.Array) -> jax.Array:
        projected = (inputs @ weight).reshape(batch, length, -1, head)
        return projected.swapaxes(1, 2)

    query = _rotate(project(weights["query"]), rotation) * head**-0.5
    key = _rotate(project(weights["key"]), rotation)
    value = project(weights["value"])

    query = query.reshape(batch, kv_heads, heads // kv_heads, length, head)
    logits = jnp.einsum("bkglh,bkmh->bkglm", query, key, preferred_element_type=jnp.float32)
    logits = jnp.where(mask, logits, jnp.finfo(jnp.float32).min)
    probs = jax.nn.softmax(logits, axis=-1).astype(inputs.dtype)
    mixed = jnp.einsum("bkglm,bkmh->bkglh", probs, value)
    mixed = mixed.reshape(batch, heads, length, head).swapaxes(1, 2)
    return mixed.reshape(batch * length, heads * head) @ weights["attention_out"]


def _gated_mlp(inputs: jax.Array, weights: Params) -> jax.Array:
    """Apply the feed-forward layer: `[tokens, dims]` to `[tokens, dims]`."""
    gated = jax.nn.silu(inputs @ weights["mlp_gate"]) * (inputs @ weights["mlp_up"])
    return gated @ weights["mlp_down"]


def make_optimizer(
    *,
    peak_learning_rate: float,
    num_steps: int,
    warmup_steps: int,
    final_fraction: float = 0.1,
    betas: tuple[float, float] = (0.9, 0.95),
    epsilon: float = 1e-8,
    weight_decay: float = 0.1,
    max_grad_norm: float = 1.0,
) -> optax.GradientTransformation:
    """Return AdamW with global-norm clipping, a linear warm-up and a cosine decay.

    Args:
      peak_learning_rate: Learning rate after the warm-up.
      num_steps: Number of steps of the schedule, including the warm-up.
      warmup_steps: Number of steps from zero to the peak.
      final_fraction: Final learning rate as a fraction of the peak.
      betas: Decay rates of AdamW's first and second moments.
      epsilon: Constant that avoids a division by zero in AdamW.
      weight_decay: Weight decay per unit of learning rate; norm scales do not decay.
      max_grad_norm: Maximum global norm; larger gradients are scaled to this norm.
    """
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=peak_learning_rate,
        warmup_steps=warmup_steps,
        decay_steps=num_steps,
        end_value=final_fraction * peak_learning_rate,
    )
    adamw = optax.adamw(
        schedule,
        b1=betas[0],
        b2=betas[1],
        eps=epsilon,
        weight_decay=weight_decay,
        mask=_is_decayed,
    )
    return optax.chain(optax.clip_by_global_norm(max_grad_norm), adamw)


def _is_decayed(params: Params) -> Params:
    return jax.tree_util.tree_map_with_path(lambda path, _: "norm" not in path[-1].key, params)


def make_train_step(config: Config, optimizer: optax.GradientTransformation) -> TrainStep:
    """Return the jitted function `(params, opt_state, batch) -> (params, opt_state, loss)`.

    The input parameters and optimizer state are donated: their buffers are reused for the outputs
    and must not be read again. The loss belongs to the input parameters.
    """

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(
        params: Params, opt_state: optax.OptState, batch: Batch
    ) -> tuple[Params, optax.OptState, jax.Array]:
        loss, grads = jax.value_and_grad(loss_fn)(params, batch, config)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return step
