"""Record what layers of Praxis compute, for the tests of layerkit.

It runs where paxml is installed, on Python 3.10 with `pip install paxml==1.4.0 jaxlib==0.4.26
'scipy<1.13'`, and imports nothing of this project:

    python scripts/praxis_reference.py packages/layerkit/tests/praxis/reference.json

The file holds one entry for each case: its inputs, its weights under Praxis' names, and its
outputs, as nested lists. Weights are drawn from a normal distribution, since several start at 0.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from praxis import (
    base_layer,
    beam_search,
    decoder_hparams,
    pax_fiddle,
    py_utils,
    sample_decode,
    token_samplers,
)
from praxis.layers import (
    activations,
    adapters,
    attentions,
    embedding_softmax,
    linears,
    normalizations,
    transformers,
)
from praxis_attention import attention
from praxis_models import defaults, first_deviations, language_models
from praxis_speech import speech
from praxis_states import quantizers, recurrent, state_spaces
from praxis_vision import convolution, networks, pooling

RANDOM = np.random.default_rng(20)
CASES = {}


def normal(*shape, scale=1.0):
    """Return normal numbers of few digits, which JSON holds exactly."""
    return np.round(RANDOM.normal(0.0, scale, shape), 3).astype(np.float32)


def record(name, **arrays):
    """Add a case; dicts are nested entries."""
    CASES[name] = jax.tree_util.tree_map(lambda x: np.asarray(x).tolist(), arrays)


def run(layer_class, *args, eval_mode=True, mutable=("aux_loss",), **fields):
    """Return (weights, outputs, updated collections) of a layer of Praxis with drawn weights."""
    call = fields.pop("call", {})
    layer = base_layer.instantiate(pax_fiddle.Config(layer_class, name="layer", **fields))
    with base_layer.JaxContext.new_context(
        hparams=base_layer.JaxContext.HParams(do_eval=eval_mode)
    ):
        variables = layer.init(jax.random.PRNGKey(0), *args, **call)
        weights = jax.tree_util.tree_map(
            lambda w: normal(*w.shape, scale=0.7), variables.get("params", {})
        )
        variables = {**variables, "params": weights}
        outputs, updates = layer.apply(variables, *args, mutable=list(mutable), **call)
    return weights, outputs, updates


def mixtures():
    """Mixtures of experts without a norm and a residual."""
    x, paddings = normal(2, 8, 4), np.zeros((2, 8), np.float32)
    paddings[1, 5:] = 1.0
    fields = {
        "input_dims": 4,
        "hidden_dims": 6,
        "num_experts": 4,
        "num_groups": 2,
        "add_skip_connection": False,
        "ln_tpl": pax_fiddle.Config(normalizations.IdentityNorm),
    }
    cases = {
        "expert_choice": {
            "gating_func": "expert_choice_v2",
            "unadjusted_expert_capacity_factor": 2.0,
        },
        "expert_choice_gated": {
            "gating_func": "expert_choice_v2",
            "unadjusted_expert_capacity_factor": 3.5,
            "use_gated_activation": True,
        },
        "capped_top2": {"gating_logit_cap": 0.5, "unadjusted_expert_capacity_factor": 4.0},
    }
    cases["capped_top2_without_padding"] = cases["capped_top2"]
    for name, options in cases.items():
        present = None if name.endswith("without_padding") else paddings
        weights, outputs, updates = run(
            transformers.TransformerFeedForwardMoe, x, present, **fields, **options
        )
        aux = updates["aux_loss"]["aux_moe_load_balance_loss"].value
        entry = {} if present is None else {"paddings": paddings}
        record(name, x=x, weights=weights, outputs=outputs, aux_loss=aux, **entry)


def softmaxes():
    """Losses of a softmax for soft targets, and with smoothed labels."""
    x, weights = normal(2, 3, 4), np.array([[1, 1, 0.5], [1, 0, 0]], np.float32)
    targets = np.asarray(jax.nn.softmax(normal(2, 3, 5)))
    ids = np.array([[0, 4, 2], [1, 3, 0]], np.int32)
    fields = {"input_dims": 4, "num_classes": 5}
    soft, out, _ = run(
        embedding_softmax.FullSoftmax,
        x,
        weights[..., None],
        call={"class_probabilities": targets},
        **fields,
    )
    record(
        "soft_targets",
        x=x,
        weights=weights,
        targets=targets,
        softmax=soft,
        xent=out.avg_xent,
        per_token=out.per_example_xent,
    )
    for name in ("avg_xent", "per_example_xent"):
        assert np.all(np.isfinite(out[name]))
    smoothed, out, _ = run(
        embedding_softmax.FullSoftmax,
        x,
        weights[..., None],
        call={"class_ids": ids[..., None]},
        label_smoothing_prob=0.1,
        label_smoothing_apply_for_eval=True,
        **fields,
    )
    record(
        "label_smoothing",
        x=x,
        weights=weights,
        ids=ids,
        softmax=smoothed,
        loss=out.avg_xent,
        per_token=out.per_example_xent,
    )
    # The entropy term of TransformerLm, from the logits of its softmax.
    entropy = jnp.sum(jax.nn.softmax(out.logits) * jax.nn.log_softmax(out.logits), axis=-1)
    record(
        "entropy_loss",
        x=x,
        weights=weights,
        softmax=smoothed,
        avg_entropy_loss=jnp.sum(entropy * weights) / jnp.sum(weights),
    )


def norms():
    """LayerNorm without a scale, and BatchNorm that trains by its moving averages."""
    x = normal(2, 5, 4)
    for name, fields in {"bias": {}, "plain": {"use_bias": False}}.items():
        weights, outputs, _ = run(normalizations.LayerNorm, x, dim=4, use_scale=False, **fields)
        record(f"layer_norm_without_scale_{name}", x=x, weights=weights, outputs=outputs)
    paddings = np.zeros((2, 5), np.float32)
    paddings[1, 3:] = 1.0
    weights, outputs, updates = run(
        normalizations.BatchNorm,
        x,
        paddings,
        dim=4,
        decay=0.9,
        use_moving_avg_in_training=True,
        eval_mode=False,
        mutable=("non_trainable",),
    )
    record(
        "batch_norm_moving",
        x=x,
        paddings=paddings,
        outputs=outputs,
        moving=updates["non_trainable"],
    )


def frames():
    """Stacked frames, with frames of the edges and paddings."""
    x, paddings = normal(2, 7, 3), np.zeros((2, 7, 1), np.float32)
    paddings[1, 4:] = 1.0
    cases = {
        "zeros_min": {},
        "edges_min": {"pad_with_left_frame": True, "pad_with_right_frame": True},
        "left_max": {"pad_with_left_frame": True, "padding_reduce_option": "reduce_max"},
        "right_min": {"pad_with_right_frame": True},
    }
    for name, fields in cases.items():
        _, (outputs, out_paddings), _ = run(
            linears.StackingOverTime,
            x,
            paddings,
            left_context=2,
            right_context=1,
            stride=3,
            **fields,
        )
        record(
            f"stacking_{name}", x=x, paddings=paddings, outputs=outputs, out_paddings=out_paddings
        )


def residuals():
    """Feed-forward blocks with a residual weight, and adapters of several tasks."""
    x = normal(2, 3, 4)
    weights, outputs, _ = run(
        transformers.TransformerFeedForward,
        x,
        input_dims=4,
        hidden_dims=6,
        residual_weight=0.5,
        has_bias=False,
    )
    record("residual_weight", x=x, weights=weights, outputs=outputs)
    by_row, by_token = np.array([2, 0], np.int32), np.array([[0, 2, 1], [1, 1, 0]], np.int32)
    for name, tasks in {"row": by_row, "token": by_token}.items():
        weights, outputs, _ = run(
            adapters.MultitaskResidualAdapter,
            x,
            call={"tasks": tasks},
            input_dims=4,
            bottleneck_dims=3,
            num_tasks=3,
        )
        record(f"adapter_by_{name}", x=x, tasks=tasks, weights=weights, outputs=outputs)


def elementwise():
    """SineReLU, and sinusoidal positional embeddings."""
    x = normal(6, scale=2.0)
    _, outputs, _ = run(activations.SineReLU, x)
    record("sine_relu", x=x, outputs=outputs)
    positions = np.array([[0, 1, 5, 100]], np.int32)
    _, outputs, _ = run(
        embedding_softmax.PositionalEmbedding,
        call={"position": positions},
        embedding_dims=6,
        min_timescale=2,
        max_timescale=1000,
    )
    record("min_timescale", positions=positions, outputs=outputs)
    _, outputs, _ = run(embedding_softmax.PositionalEmbedding2D, h=3, w=2, embedding_dims=8)
    record("positions_2d", outputs=outputs)


def samplers():
    """Tokens that sampling may draw, for top-k of each row, and top-p with equal logits."""
    logits, top_k = normal(4, 9, scale=2.0), np.array([1, 3, 5, 9], np.int32)
    kept, indices = token_samplers.get_top_k(logits, 6, top_k)
    allowed = np.zeros(logits.shape, bool)
    np.put_along_axis(allowed, np.asarray(indices), np.asarray(kept) > -1e6, axis=1)
    record("per_example_top_k", logits=logits, top_k=top_k, allowed=allowed)
    logits = np.log(np.array([[0.5, 0.2, 0.2, 0.1], [0.25, 0.25, 0.25, 0.25]], np.float32))
    masked = token_samplers.top_p_mask_logits(logits, 0.6)
    record("top_p", logits=logits, p=0.6, allowed=np.asarray(masked) > -1e6)


def row_options():
    """Numbers of draws of each token, with the options of each row."""
    logits, draws = normal(4, 9, scale=2.0), 20_000
    temperature, top_k = np.array([0.5, 1, 2, 1.5], np.float32), np.array([3, 5, 8, 9], np.int32)
    top_p = np.array([1.0, 0.7, 0.9, 0.6], np.float32)

    def draw(key):
        ids, _ = token_samplers.sample_from_top_k_and_top_p(
            logits, key, jnp.asarray(temperature)[:, None], 9, jnp.asarray(top_p)[:, None], top_k
        )
        return ids

    keys = jax.random.split(jax.random.PRNGKey(7), draws)
    ids = np.asarray(jax.jit(jax.vmap(draw))(keys))
    counts = np.stack([np.bincount(row, minlength=9) for row in ids.T])
    options = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    record("row_options", logits=logits, counts=counts, **options)


def expert_dropout():
    """Values of hidden activations of one expert after dropout, and the share that is kept."""
    dims = 64
    x, paddings = np.ones((4, 16, dims), np.float32), np.zeros((4, 16), np.float32)
    layer = base_layer.instantiate(
        pax_fiddle.Config(
            transformers.TransformerFeedForwardMoe,
            name="layer",
            input_dims=dims,
            hidden_dims=dims,
            num_experts=1,
            num_groups=1,
            gating_func="expert_choice_v2",
            unadjusted_expert_capacity_factor=1.0,
            add_skip_connection=False,
            ln_tpl=pax_fiddle.Config(normalizations.IdentityNorm),
            activation_tpl=pax_fiddle.Config(activations.Identity),
            relu_dropout_prob=0.25,
        )
    )
    with base_layer.JaxContext.new_context(hparams=base_layer.JaxContext.HParams(do_eval=False)):
        variables = layer.init(jax.random.PRNGKey(0), x, paddings)
        ones = jnp.eye(dims)[None]
        params = {**variables["params"], "wi_0": ones, "wo_0": ones}
        params["gate"] = jnp.zeros_like(params["gate"])
        outputs = layer.apply(
            {**variables, "params": params}, x, paddings, rngs={"random": jax.random.PRNGKey(1)}
        )
    values = np.asarray(outputs)
    record("expert_dropout", values=np.unique(values), kept=np.mean(values != 0))


def causal_mask(batch, length):
    """Return the mask of Praxis, `[batch, 1, length, length]`, that excludes later keys."""
    excluded = py_utils.get_large_negative_number(np.float32)
    causal = np.where(np.tri(length, dtype=bool), 0.0, excluded).astype(np.float32)
    return np.tile(causal, (batch, 1, 1, 1))


def extra_logits():
    """Attention of GLaM: no scale, and an extra logit in the sum of the softmax."""
    x = normal(2, 7, 4)
    weights, (outputs, _), _ = run(
        attentions.DotProductAttention,
        *(x, x, x, causal_mask(2, 7)),
        input_dim=4,
        hidden_dim=6,
        num_heads=2,
        use_bias=False,
        internal_enable_query_scale=False,
        attention_extra_logit=0.5,
    )
    record("extra_logit", x=x, weights=weights, outputs=outputs)


def relative_biases():
    """Attention with a relative bias and logits that are scaled after it."""
    x, positions = normal(2, 7, 4), np.tile(np.arange(7, dtype=np.int32), (2, 1))
    bias = pax_fiddle.Config(
        attentions.RelativeBias, relative_attention_num_buckets=4, relative_attention_max_distance=6
    )
    weights, (outputs, _), _ = run(
        attentions.DotProductAttention,
        *(x, x, x, causal_mask(2, 7)),
        call={"query_segment_pos": positions, "key_segment_pos": positions},
        input_dim=4,
        hidden_dim=6,
        num_heads=2,
        use_bias=False,
        internal_enable_query_scale=False,
        scale_logits_by_head_dims=True,
        relative_bias_tpl=bias,
    )
    record("relative_bias", x=x, weights=weights, outputs=outputs)


class TableModel(base_layer.BaseLayer):
    """A model whose logits are a row of a table, at a place that all tokens so far determine."""

    def decode(self, table, prompts, lengths, search):
        """Return what `search(model, extend_step, prompts, lengths)` decodes."""

        def extend_step(model, ids, positions, state):
            del model, ids
            rows = state.output_ids.reshape(-1, state.output_ids.shape[-1])
            # Column `step` has the newest token, whose position in its row is `positions`.
            columns = jnp.arange(rows.shape[-1]) - state.step + positions[:, None]
            counts = (columns >= 0) & (columns <= positions[:, None])
            places = jnp.where(counts, (rows + 1) * (7 * columns + 3), 0).sum(-1) % len(table)
            return table[places]

        return search(self, extend_step, prompts, lengths)


def searches():
    """Beam searches, and greedy decoding whose steps over the prompt count."""
    table = normal(97, 5, scale=1.5)
    prompts, lengths = np.array([[1, 2, 4], [3, 0, 0], [4, 1, 0]]), np.array([3, 1, 2])
    given = {"table": table, "prompts": prompts, "prompt_lengths": lengths}
    model = base_layer.instantiate(pax_fiddle.Config(TableModel, name="table"))

    def decode(search):
        with base_layer.JaxContext.new_context(hparams=base_layer.JaxContext.HParams(do_eval=True)):
            arguments = *map(jnp.asarray, (table, prompts, lengths)), search
            return model.apply({}, *arguments, method=model.decode, mutable=True)[0]

    def search(fields):
        hparams = decoder_hparams.BeamSearchHParams(eos_id=2, **fields)

        def call(model, extend_step, prompts, lengths):
            rows = sample_decode.right_align_prefix_ids(prompts, lengths, jnp.float32)
            return beam_search.beam_search_after_prefix_fprop(
                model, extend_step, keep_state, *rows, hparams
            )

        return call

    def keep_state(model, transform):
        """Change nothing, since the model has no cache."""

    for name, fields in {
        "ended": {"beam_size": 3, "max_decode_steps": 4},
        "minimum": {"beam_size": 4, "max_decode_steps": 5, "min_decode_steps": 3},
        "two_tokens": {"beam_size": 4, "max_decode_steps": 5, "tokens_per_beam": 2},
    }.items():
        result = decode(search(fields))
        outputs = {"ids": result.output_ids, "lengths": result.decode_lengths}
        record(f"beam_search_{name}", **given, **outputs, scores=result.scores)

    def greedy(model, extend_step, prompts, lengths):
        paddings = (jnp.arange(3) >= lengths[:, None]).astype(jnp.float32)
        return sample_decode.greedy_decode(
            model,
            extend_step,
            prompts,
            paddings,
            9,
            max_decode_steps=4,
            prefix_lengths=lengths,
            transform_state_fn=keep_state,
        )

    result = decode(greedy)
    record("greedy_steps", **given, ids=result.output_ids, lengths=result.decode_lengths)


def main():
    """Write all cases to the file that is named on the command line."""
    for add in (mixtures, softmaxes, norms, frames, residuals, elementwise, samplers):
        add()
    for add in (row_options, expert_dropout, relative_biases, extra_logits, searches):
        add()
    for add in (language_models, first_deviations, defaults):
        add(record, run, RANDOM)
    for add in (convolution, pooling, networks, recurrent, quantizers, state_spaces, speech):
        add(record)
    attention(record)
    lines = [f"{json.dumps(name)}: {json.dumps(case)}" for name, case in CASES.items()]
    Path(sys.argv[1]).write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
