"""Cases of `praxis_reference.py` that are about local attention, Primer and N-grammers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from praxis import base_layer, pax_fiddle
from praxis.layers import attentions, ngrammer

RANDOM = np.random.default_rng(45)


def normal(*shape, scale=1.0):
    """Return normal numbers of few digits, which JSON holds exactly."""
    return np.round(RANDOM.normal(0.0, scale, shape), 3).astype(np.float32)


def differentiate(layer_class, x, call, paddings=0.0, **fields):
    """Return a case of a layer: `call(apply, x)` calls it with outputs like `x`."""
    layer = base_layer.instantiate(pax_fiddle.Config(layer_class, name="layer", **fields))
    key = jax.random.PRNGKey(0)
    probe = normal(*x.shape) * (1 - np.broadcast_to(paddings, x.shape[:2])[..., None])
    with base_layer.JaxContext.new_context(hparams=base_layer.JaxContext.HParams(do_eval=True)):
        variables = call(lambda *args, **named: layer.init(key, *args, **named), x)
        drawn = jax.tree_util.tree_map(lambda w: normal(*w.shape, scale=0.5), dict(variables))

        def loss(weights, x):
            held = {**drawn, "params": weights}
            outputs = call(lambda *args, **named: layer.apply(held, *args, **named), x)
            outputs = outputs[0] if isinstance(outputs, tuple) else outputs
            return jnp.sum(outputs * probe), outputs

        gradient, outputs = jax.grad(loss, argnums=(0, 1), has_aux=True)(drawn["params"], x)
    return {
        "x": x,
        "probe": probe,
        "weights": drawn["params"],
        "state": drawn.get("non_trainable", {}),
        "outputs": outputs,
        "gradient": gradient[0],
        "input_gradient": gradient[1],
    }


def attention(record):
    """Attention with their gradients, and bigrams of given ids and of clusters."""
    segments = np.array([[1, 1, 1, 2, 2, 2, 2], [1, 1, 1, 1, 1, 2, 2]], np.int32)
    places = np.array([[0, 1, 2, 0, 1, 2, 3], [0, 1, 2, 3, 4, 0, 1]], np.int32)
    fields = {"input_dim": 4, "hidden_dim": 4, "num_heads": 2}
    fields["internal_enable_per_dim_scale"] = False

    def primer(apply, x):
        mask = attentions.causal_segment_mask(segments, jnp.float32)
        return apply(x, x, x, mask, query_segment_pos=places, key_segment_pos=places)

    case = differentiate(
        attentions.DotProductAttention, normal(2, 7, 4), primer, dconv_qkv=True, **fields
    )
    record("primer_attention", segments=segments, **case)

    paddings = np.zeros((2, 17), np.float32)
    paddings[1, 13:] = 1.0

    def local(apply, x):
        mask = attentions.convert_paddings_to_mask(paddings, jnp.float32)
        return apply(x, x, x, mask)

    near = {"block_size": 3, "left_context": 3, "right_context": 2, **fields}
    for name, layer_class, more in (
        ("local_attention", attentions.LocalSelfAttention, {}),
        ("local_attention_xl", attentions.LocalSelfAttentionXL, {"rel_pos_emb_dim": 4}),
    ):
        case = differentiate(layer_class, normal(2, 17, 4), local, paddings, **near, **more)
        record(name, paddings=paddings, **case)

    ids = RANDOM.integers(0, 9, (2, 7)).astype(np.int32)
    padded = (np.arange(7) >= np.array([7, 5])[:, None]).astype(np.float32)

    def bigrams(apply, x):
        return apply(ids, x, padded, places)

    heads = {"num_heads": 2, "dim_per_head": 4, "ngram_vocab_size": 11}
    for name, layer_class, more in (
        ("ngrammer", ngrammer.Ngrammer, {"unigram_vocab_size": 9, "ngram_emb_dim": 3}),
        ("ngrammer_added", ngrammer.Ngrammer, {"unigram_vocab_size": 9, "ngram_emb_dim": 4}),
        ("ngrammer_clusters", ngrammer.VQNgrammer, {"num_clusters": 5, "ngram_emb_dim": 3}),
    ):
        concatenates = more["ngram_emb_dim"] == 3
        case = differentiate(
            layer_class, normal(2, 7, 8), bigrams, concat_ngrams=concatenates, **heads, **more
        )
        record(name, ids=ids, paddings=padded, segment_pos=places, **case)

    record("lazy_prefix_broadcast", **lazy_prefix_broadcast())


def lazy_prefix_broadcast():
    """Return a case of steps of two samples of each prompt, which share its keys and values."""
    prompts, samples = normal(2, 3, 4), normal(4, 2, 4)
    fields = {"input_dim": 4, "hidden_dim": 4, "num_heads": 2, "atten_logit_cap": 2.0}
    config = pax_fiddle.Config(attentions.DotProductAttentionWithLPB, name="layer", **fields)
    layer = base_layer.instantiate(config.set(internal_enable_per_dim_scale=False))
    caches, outputs = [base_layer.DECODE_CACHE, base_layer.PREFIX_DECODE_CACHE], []
    rows = [prompts] * 3 + [attentions.causal_mask(prompts)]
    with base_layer.JaxContext.new_context(hparams=base_layer.JaxContext.HParams(do_eval=True)):
        shapes = layer.init(jax.random.PRNGKey(0), *rows)["params"]
        weights = jax.tree_util.tree_map(lambda w: normal(*w.shape, scale=0.5), shapes)
        held = {"params": weights}
        held |= layer.apply(held, *rows, mutable=caches[:1])[1]
        sizes = {"num_suffix_samples": 2, "suffix_length": 2}
        share = {"method": layer.lazy_broadcast_prefix, "mutable": caches}
        held |= layer.apply(held, **sizes, **share)[1]
        masks = attentions.causal_mask(np.zeros((1, 5, 4), np.float32))
        for step in range(2):
            at = {"atten_mask": masks[:, :, 3 + step], "time_step": 3 + step, "segment_pos": None}
            extend = {"method": layer.extend_step, "mutable": caches[:1]}
            output, state = layer.apply(held, samples[:, step], **at, **extend)
            held |= state
            outputs.append(output)
    outputs = np.stack(outputs, axis=1)
    return {"prompts": prompts, "samples": samples, "weights": weights, "outputs": outputs}
