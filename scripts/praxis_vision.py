"""Cases of `praxis_reference.py` that are about images."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from praxis import base_layer, pax_fiddle, py_utils
from praxis.layers import convolutions, poolings, resnets, vits

RANDOM = np.random.default_rng(9)


def normal(*shape, scale=0.7):
    """Return normal numbers of few digits, which JSON holds exactly."""
    return np.round(RANDOM.normal(0.0, scale, shape), 3).astype(np.float32)


def run(config, x, *, eval_mode=True):
    """Return weights, outputs, gradients and changed state of a layer of Praxis with drawn weights.

    The gradients are those of the sum of the product of the outputs and `cotangent`, with respect
    to the weights and to x.
    """
    layer = base_layer.instantiate(config.clone().set(name="layer"))
    hparams = base_layer.JaxContext.HParams(do_eval=eval_mode)
    with base_layer.JaxContext.new_context(hparams=hparams):
        variables = layer.init(jax.random.PRNGKey(0), x)
        weights = jax.tree_util.tree_map(lambda w: normal(*w.shape), variables["params"])

        def apply(weights, x):
            return layer.apply({**variables, "params": weights}, x, mutable=["non_trainable"])

        outputs, state = apply(weights, x)
        cotangent = normal(*outputs.shape)
        gradients, of_x = jax.grad(
            lambda weights, x: jnp.sum(apply(weights, x)[0] * cotangent), (0, 1)
        )(weights, x)
    trees = {"weights": weights, "gradients": gradients, "state": state.get("non_trainable", {})}
    flat = {
        name: dict(py_utils.NestedMap.FromNestedDict(tree).FlattenItems())
        for name, tree in trees.items()
    }
    return {"x": x, "cotangent": cotangent, "gradient_of_x": of_x, "outputs": outputs, **flat}


def convolution(record):
    """Convolutions with each padding, strides, dilations and groups."""
    x = normal(1, 7, 6, 4)
    cases = {
        "even": {"filter_stride": (2, 3)},
        "valid": {"padding": "VALID", "filter_stride": (1, 2), "dilations": (2, 1)},
        "same": {"tf_equivalent_padding": True, "filter_stride": (2, 2), "bias": True},
        "causal": {"tf_equivalent_padding": True, "is_causal": True, "filter_stride": (1, 1)},
        "groups": {"filter_shape": (2, 3, 2, 6), "filter_stride": (1, 1)},
    }
    for name, fields in cases.items():
        fields = {"filter_shape": (3, 2, 4, 6), **fields}
        record(f"conv_{name}", **run(pax_fiddle.Config(convolutions.Conv2D, **fields), x))
    depthwise = pax_fiddle.Config(
        convolutions.DepthwiseConv1D, filter_shape=(3, 4, 2), is_causal=True, rhs_dilation_rate=2
    )
    record("conv_depthwise", **run(depthwise, normal(2, 7, 4)))
    video = pax_fiddle.Config(
        convolutions.Conv3D, filter_shape=(2, 1, 2, 3, 2), filter_stride=(1, 2, 1)
    )
    record("conv_video", **run(video, normal(1, 3, 4, 3, 3)))


def pooling(record):
    """Pooling of windows and of all positions, with and without padding."""
    x, paddings = normal(3, 7, 5, 2), np.zeros((3, 7), np.float32)
    paddings[1, 4:] = 1.0
    paddings[2] = 1.0
    x *= 1.0 - paddings[..., None, None]
    for kind in ("MAX", "AVG"):
        for padding, stride in (("SAME", (1, 1)), ("SAME", (2, 3)), ("VALID", (2, 1))):
            fields = {"window_shape": (3, 2), "window_stride": stride, "pooling_type": kind}
            config = pax_fiddle.Config(poolings.Pooling, padding=padding, **fields)
            layer = base_layer.instantiate(config.set(name="layer"))
            outputs, _ = layer.apply({}, x)
            masked, left = layer.apply({}, x, paddings)
            name = f"pooling_{kind}_{padding}_{stride[0]}".lower()
            record(name, x=x, paddings=paddings, outputs=outputs, masked=masked, left=left)
        config = pax_fiddle.Config(
            poolings.GlobalPooling, name="layer", pooling_type=kind, pooling_dims=(1, 2)
        )
        layer = base_layer.instantiate(config)
        masked = layer.apply({}, x[:2], compatible_paddings=paddings[:2, :, None, None])
        if kind == "AVG":  # Praxis divides by the number of rows, not of positions.
            masked = masked / x.shape[2]
        whole = layer.apply({}, x[:2])
        record(
            f"global_pooling_{kind.lower()}", x=x, paddings=paddings, outputs=whole, masked=masked
        )


def networks(record):
    """Residual networks in training, and a vision Transformer with interpolated positions."""
    images = normal(2, 12, 12, 3)
    blocks = {"bottleneck": resnets.ResNetBlock, "basic": resnets.ResNetBasicBlock}
    for name, block in blocks.items():
        config = pax_fiddle.Config(
            resnets.ResNet,
            block_params=pax_fiddle.Config(block),
            channels=(4, 8),
            blocks=(1, 1),
            strides=(1, 2),
            kernels=(3, 3),
            output_spatial_pooling_params=None,
        )
        record(f"resnet_{name}", **run(config, images, eval_mode=False))
    vit = vits.build_vision_transformer_hparams_for_test((2, 2), 4, 3, 8, 12, 2, 2)
    vit.exit_layers_tpl.set(output_fc_tanh=False, output_dim=0, pooled=False)
    record("vision_transformer", **run(vit, normal(2, 12, 8, 3)))
