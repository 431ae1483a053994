"""Models of speech on meshes of eight devices have the loss, gradients and labels of one device."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding

from layerkit.base.base_layer import NON_TRAINABLE, PARAMS, RANDOM
from layerkit.base.sharding import DEFAULT_RULES, STANDARD_MESH_AXES, BoundSharding
from layerkit.base.weights import is_box
from layerkit.config.nested_map import NestedMap
from layerkit.decoding import SampleDecoder
from layerkit.layers import ConformerEncoder, SpeechTransformerEncoder
from layerkit.models import AttentionDecoderModel, BestRqModel

KEY = jax.random.key(0)
DRAWS = np.random.default_rng(0)
LENGTHS = np.array([24, 13, 24, 16, 20, 24, 8, 24])
BATCH = NestedMap(
    src=NestedMap(
        features=DRAWS.normal(size=(8, 24, 4)).astype(np.float32),
        paddings=np.float32(np.arange(24) >= LENGTHS[:, None]),
    ),
    tgt=NestedMap(
        labels=DRAWS.integers(1, 6, (8, 4)).astype(np.int32),
        paddings=np.float32(np.arange(4) >= np.array([4, 2, 3, 1, 4, 4, 2, 1])[:, None]),
    ),
)
SIZES = {"num_bins": 4, "model_dims": 8, "hidden_dims": 8, "num_heads": 2}


def attention_decoder():
    config = AttentionDecoderModel.HParams.config(
        frontend_tpl=None, augmenter_tpl=None, ctc_weight=0.3, prompt_ids=(7,)
    )
    encoder = SpeechTransformerEncoder.HParams.config(**SIZES)
    sizes = {"model_dims": 8, "hidden_dims": 8, "num_heads": 2}
    config.model_tpl.set(vocab_size=8, encoder_tpl=encoder, **sizes)
    config.decoder = SampleDecoder.HParams.config(temperature=0.0, max_decode_steps=6, eos_id=6)
    return config


def best_rq():
    encoder = ConformerEncoder.HParams.config(num_channels=4, **SIZES)
    config = BestRqModel.HParams.config(frontend_tpl=None, encoder_tpl=encoder)
    config.set(mask_prob=0.1, mask_frames=8)
    config.quantizer_tpl.set(num_classes=8, num_groups=2, projection_dims=8)
    return config


def run(model, variables, batch):
    """The loss, its gradients, the statistics of a step, and decoded labels."""
    training = model.clone(train=True)

    def loss(params):
        rest = {"mutable": [NON_TRAINABLE], "rngs": {RANDOM: KEY}}
        (metrics, _), state = training.apply({**variables, PARAMS: params}, batch, **rest)
        return {name: metric.value for name, metric in metrics.items()}, state

    gradients = jax.grad(lambda params: loss(params)[0]["loss"])(variables[PARAMS])
    ids = model.apply(variables, batch, method="decode").ids if model.can_decode else None
    return gradients, loss(variables[PARAMS]), ids


@pytest.mark.slow
@pytest.mark.parametrize("make", [attention_decoder, best_rq])
def test_loss_gradients_and_labels_equal_those_of_one_device(make):
    model = make().Instantiate()
    variables = jax.jit(model.init)(KEY)
    expected = jax.jit(lambda v, b: run(model, v, b))(variables, BATCH)
    # data, fsdp, tensor, stage, expert, context
    mesh = Mesh(np.reshape(jax.devices(), (1, 2, 2, 1, 1, 2)), STANDARD_MESH_AXES)
    bound = BoundSharding(mesh, DEFAULT_RULES)
    boxed = jax.eval_shape(model.init_boxed, KEY)
    layouts = jax.tree.map(
        lambda box: bound.sharding(box.axes, shape=box.value.shape), boxed, is_leaf=is_box
    )
    split = model.clone(sharding=bound)
    with jax.set_mesh(mesh):
        rows = NamedSharding(mesh, bound.spec(("batch",)))
        batch = jax.tree.map(lambda x: jax.device_put(x, rows), BATCH)
        step = jax.jit(lambda v, b: run(split, v, b))
        result = step(jax.device_put(variables, layouts), batch)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * max(1, jnp.abs(b).max())),
        jax.device_get(result),
        jax.device_get(expected),
    )
