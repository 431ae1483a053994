"""Every field of every model changes something."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import layerkit.layers as L  # noqa: N812 - the index is read as one name, a layer a line
import layerkit.models as M  # noqa: N812
from layerkit.base.base_model import BaseModel
from layerkit.config import Config
from layerkit.config.nested_map import NestedMap
from layerkit.decoding import SampleDecoder
from layerkit.models.language_model import DecodedLm
from layerkit.models.preference_model import PolicyModel
from layerkit.testing import Change, Example, dead_fields, ignored_fields

BATCH, LENGTH, VOCAB = 4, 8, 16
RANDOM = np.random.default_rng(0)
IDS, LABELS = jnp.asarray(RANDOM.integers(0, VOCAB, (2, BATCH, LENGTH)), jnp.int32)
WEIGHTS = jnp.ones((BATCH, LENGTH))
ROWS = NestedMap(ids=IDS, labels=LABELS, weights=WEIGHTS)
NUMBERS = jnp.asarray(RANDOM.normal(size=(BATCH, 8)), jnp.float32)
EMBEDDING = Config(L.Embedding)
POSITION = Config(L.PositionalEmbedding)
GREEDY = Config(SampleDecoder, temperature=0.0, max_decode_steps=8)
# The prompt is one token, and the mesh splits what the cache holds.
ONE_AND_15 = Config(SampleDecoder, temperature=0.0, max_decode_steps=15)


def of(layer_class, fields, run, **changes):
    return Example(Config(layer_class, **fields), run, changes)


def small(layer_class, **fields):
    sizes = {"vocab_size": VOCAB, "model_dims": 8, "hidden_dims": 8, "num_heads": 4}
    return Config(layer_class, **sizes, **fields)


def lm(layer):
    return layer(IDS, labels=LABELS, weights=WEIGHTS)


def encoder_decoder(layer):
    source = IDS if layer.encoder_tpl is None else jnp.tile(NUMBERS[:, None], (1, 16, 1))
    return layer(source, LABELS, labels=IDS, weights=WEIGHTS)


def model(batch):
    return lambda layer: layer(batch)


def model_and_decoding(batch):
    # In training, a cached encoder could not update the statistics of its BatchNorm.
    return lambda layer: (layer(batch), None if layer.train else layer.decode(batch).ids)


PROMPTS = NestedMap(ROWS, inputs_indicator=jnp.ones_like(IDS))
SEGMENTS = {"segment_ids": jnp.ones_like(IDS).at[:, -1].set(0)}
PREFERENCES = NestedMap(
    chosen=NestedMap(ROWS, **SEGMENTS), rejected=NestedMap(ROWS, ids=LABELS, labels=IDS, **SEGMENTS)
)
JUDGEMENTS = NestedMap(answer=ROWS, is_desirable=IDS[:, 0] % 2)

TOWER = Config(L.VisionTransformer, model_dims=8, hidden_dims=8, num_heads=4, position_grid=(2, 2))
TOWER.set(pool_tpl=Config(L.GlobalPooling), patch_tpl=Config(L.PatchEmbedding, patch_size=1))
IMAGES = jnp.broadcast_to(NUMBERS[:, :4].reshape(BATCH, 2, 2, 1), (BATCH, 2, 2, 3))
SPEECH = NestedMap(
    src=NestedMap(
        features=jnp.tile(NUMBERS[:, None], (1, 16, 1)),
        paddings=jnp.zeros((BATCH, 16)),
        waveform=jnp.ones((BATCH, 2400)),
        lengths=jnp.full(BATCH, 2400),
    ),
    tgt=NestedMap(labels=IDS[:, :2] % 7 + 1, paddings=jnp.zeros((BATCH, 2))),
)
ENCODER = Config(
    L.ConformerEncoder, num_bins=8, num_channels=4, model_dims=8, hidden_dims=8, num_heads=4
)
SPEECH_FIELDS = {
    "vocab_size": VOCAB,
    "frontend_tpl": Config(L.LogMel, num_bins=8),
    "encoder_tpl": ENCODER,
}
SPEECH_CHANGES = {
    "frontend_tpl": Config(L.LogMel, num_bins=8, power=1.0),
    "augmenter_tpl": Config(L.SpectrumAugmenter, time_mask_count=1),
    "encoder_tpl": ENCODER.clone(is_causal=True),
}

EXAMPLES = [
    of(
        M.ContrastiveModel,
        {"vision_tpl": TOWER, "text_tpl": small(M.TransformerLm), "embed_dims": 4},
        model(NestedMap(images=IMAGES, ids=IDS)),
        text_end_id=3,
        loss_tpl=Config(L.ContrastiveLoss, kind="sigmoid"),
    ),
    Example(
        small(M.TransformerLm),
        lm,
        {
            "num_kv_heads": 2,
            "dim_per_head": 4,
            "embedding_tpl": EMBEDDING,
            "position_tpl": POSITION,
            "token_type_tpl": Config(L.Embedding, num_classes=2),
            "embedding_norm_tpl": Config(L.LayerNorm),
            "images_tpl": Config(L.ImageEmbedding, token_id=3, tower_tpl=TOWER),
            "layer_inputs_tpl": Change(Config(L.LayerInputs, dims=4), refusal="layer_input"),
            "mtp_tpl": Config(L.MultiTokenPrediction),
            "ngrammer_tpl": Config(L.NGrammer, num_heads=2, num_buckets=3, quantizer_tpl=None),
            "head_tpl": Config(L.NormalizedFeedForward),
            "dropout_rate": 0.5,
        },
    ),
    Example(
        small(M.TransformerEncoderDecoder),
        encoder_decoder,
        {
            "source_vocab_size": Change(32, others={"source_embedding_tpl": EMBEDDING}),
            "num_kv_heads": 2,
            "dim_per_head": 4,
            "embedding_tpl": EMBEDDING,
            "source_embedding_tpl": EMBEDDING,
            "position_tpl": POSITION,
            "embedding_norm_tpl": Config(L.LayerNorm),
            "dropout_rate": 0.5,
            "output_dropout_rate": 0.5,
            "encoder_tpl": ENCODER,
        },
    ),
    of(
        M.LanguageModel,
        {"lm_tpl": small(M.TransformerLm), "decoder": GREEDY},
        model_and_decoding(NestedMap(PROMPTS, eval_sample_weights=jnp.ones(BATCH))),
        decoder=Config(SampleDecoder, temperature=0.0, max_decode_steps=16),
    ),
    of(
        M.SequenceModel,
        {"model_tpl": small(M.TransformerEncoderDecoder), "decoder": ONE_AND_15},
        model_and_decoding(
            NestedMap(src=NestedMap(ids=IDS), tgt=ROWS, eval_sample_weights=jnp.ones(BATCH))
        ),
        decoder=Config(SampleDecoder, temperature=0.0, max_decode_steps=31),
        prompt_ids=(3,),
    ),
    of(
        M.BertModel,
        {"lm_tpl": small(M.TransformerLm, is_causal=False)},
        model(NestedMap(ids=IDS)),
        augmenter_tpl=Config(L.MaskedLmAugmenter, mask_prob=0.5),
        unmasked_ids=(1,),
    ),
    of(
        M.ClassificationModel,
        {
            "network_tpl": Config(L.Linear, input_dims=8, output_dims=8),
            "softmax_tpl": Config(
                L.FullSoftmax, input_dims=8, num_classes=4, activation_axes=("batch", None)
            ),
        },
        model(NestedMap(inputs=NUMBERS, labels=IDS[:, 0] % 4)),
        input_field=Change("image", refusal="no such key: 'image'"),
        label_field=Change("digit", refusal="no such key: 'digit'"),
        top_k=2,
    ),
    of(
        M.PreferenceModel,
        {"lm_tpl": small(M.TransformerLm), "decoder": GREEDY},
        lambda layer: (layer(PREFERENCES), layer.decode(PROMPTS).ids),
        reference="none",
        loss="hinge",
        gamma=Change(0.5, others={"loss": "simpo", "reference": "none"}),
        decoder=Config(SampleDecoder, temperature=0.0, max_decode_steps=16),
    ),
    of(
        M.KtoModel,
        {"lm_tpl": small(M.TransformerLm), "decoder": GREEDY},
        lambda layer: (layer(JUDGEMENTS), layer.decode(PROMPTS).ids),
        reference="none",
        decoder=Config(SampleDecoder, temperature=0.0, max_decode_steps=16),
    ),
    of(
        M.AttentionDecoderModel,
        {
            "frontend_tpl": SPEECH_FIELDS["frontend_tpl"],
            "model_tpl": small(M.TransformerEncoderDecoder, encoder_tpl=ENCODER),
            "decoder": Config(SampleDecoder, temperature=0.0, max_decode_steps=15, eos_id=9),
        },
        # The mesh splits the start, three labels, and two ids of a prompt.
        model_and_decoding(
            NestedMap(SPEECH, tgt=NestedMap(labels=IDS[:, :3], paddings=jnp.zeros((BATCH, 3))))
        ),
        frontend_tpl=SPEECH_CHANGES["frontend_tpl"],
        augmenter_tpl=SPEECH_CHANGES["augmenter_tpl"],
        model_tpl=small(M.TransformerEncoderDecoder, encoder_tpl=SPEECH_CHANGES["encoder_tpl"]),
        decoder=Config(SampleDecoder, temperature=0.0, max_decode_steps=31, eos_id=9),
        prompt_ids=(3, 4),
        apply_eval_sample_weights=Change(value=True, refusal="apply_eval_sample_weights"),
        ctc_softmax_tpl=Change(Config(L.FullSoftmax), others={"ctc_weight": 0.5}),
    ),
    of(M.CtcModel, SPEECH_FIELDS, model_and_decoding(SPEECH), **SPEECH_CHANGES),
    of(
        M.BestRqModel,
        {
            "frontend_tpl": SPEECH_FIELDS["frontend_tpl"],
            "encoder_tpl": ENCODER,
            "quantizer_tpl": Config(L.RandomVectorQuantizer, num_classes=8),
            "mask_prob": 0.5,
        },
        model(SPEECH),
        frontend_tpl=SPEECH_CHANGES["frontend_tpl"],
        encoder_tpl=SPEECH_CHANGES["encoder_tpl"],
        stacking_tpl=Config(L.StackingOverTime, left=1, right=3, stride=4),
        quantizer_tpl=Config(L.RandomVectorQuantizer, num_classes=16),
        mask_frames=2,
    ),
    of(
        M.TransducerModel,
        {**SPEECH_FIELDS, "joint_dims": 8, "chunk_size": 2},
        model_and_decoding(SPEECH),
        projection_tpl=Config(L.FeedForward),
        activation_tpl=Config(L.ReLU),
        chunk_size=1,
        **SPEECH_CHANGES,
    ),
    of(M.RewardModel, {"lm_tpl": small(M.TransformerLm)}, model(PREFERENCES)),
    of(
        M.DistillationModel,
        {
            "lm_tpl": small(M.TransformerLm),
            "teacher_tpl": small(M.TransformerLm),
            "decoder": GREEDY,
        },
        lambda layer: (layer(ROWS), layer.decode(NestedMap(ids=IDS)).ids),
        decoder=Config(SampleDecoder, temperature=0.0, max_decode_steps=16),
        features=((0, 0),),
        num_ids=5,
        feature_weight=Change(0.5, others={"features": ((0, 0),)}),
        prompt_length=Change(4, others={"on_policy_fraction": 0.5}),
    ),
]


# Parts of their networks are examples of their own.
SLOW = {
    M.TransformerLm,
    M.TransformerEncoderDecoder,
    M.ContrastiveModel,
    M.AttentionDecoderModel,
    M.BestRqModel,
    M.CtcModel,
    M.TransducerModel,
    M.SequenceModel,
    M.PreferenceModel,
    M.KtoModel,
    M.DistillationModel,
}


def test_changing_a_field_has_an_effect(example, sharding):
    assert dead_fields(example, sharding=sharding) == []


@pytest.mark.slow
def test_ignored_field_raises(example, sharding):
    assert ignored_fields(example, sharding=sharding) == []


def test_every_model_has_an_example(layers_in):
    assert layers_in(M) <= {example.layer_class for example in EXAMPLES} | {
        BaseModel,
        DecodedLm,
        PolicyModel,
    }
