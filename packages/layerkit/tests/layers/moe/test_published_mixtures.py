"""Mixtures of experts of published models, compared with their reference code."""

from __future__ import annotations

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layerkit.layers.basic.elementwise import SiLU
from layerkit.layers.moe.routing import TopKRouter
from layerkit.layers.moe.token_choice import MoeFeedForward
from layerkit.layers.transformer.transformer import TransformerFeedForward

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

DIMS, HIDDEN, EXPERTS = 8, 6, 8
SIZES = {"input_dims": DIMS, "hidden_dims": HIDDEN, "num_experts": EXPERTS}
X = np.random.default_rng(0).normal(size=(2, 7, DIMS)).astype(np.float32)


def drawn(family, block_class, *, hidden="intermediate_size", chosen, **fields):
    """Build a block of a family and fill every weight and buffer with nonzero numbers."""
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    fields |= {"hidden_size": DIMS, hidden: HIDDEN, "num_local_experts": EXPERTS}
    fields |= {"num_experts_per_tok": chosen, "experts_implementation": "eager"}
    config_class = transformers.CONFIG_MAPPING[family]
    block = getattr(module, block_class)(config_class(**fields))
    torch.manual_seed(1)
    with torch.no_grad():
        for tensor in (*block.parameters(), *block.buffers()):
            tensor.copy_(0.5 * torch.randn(tensor.shape))
    return block.eval()


def array(tensor):
    return tensor.detach().numpy()


def expert_weights(experts):
    """`gate_up_proj` `[experts, 2·hidden, dims]`, `down_proj` `[experts, dims, hidden]` as ours."""
    gate, up = np.split(array(experts.gate_up_proj).swapaxes(1, 2), 2, axis=-1)
    return {"gate": gate, "up": up, "down": array(experts.down_proj).swapaxes(1, 2)}


def linears(**modules):
    return {name: {"w": array(module.weight).T} for name, module in modules.items()}


def shared_weights(mlp):
    return linears(gate=mlp.gate_proj, up=mlp.up_proj, down=mlp.down_proj)


def check(block, layer, variables):
    with torch.no_grad():
        expected = block(torch.from_numpy(X))
        expected = (expected[0] if isinstance(expected, tuple) else expected).numpy()
    assert jax.tree.map(jnp.shape, variables) == jax.tree.map(
        jnp.shape, jax.eval_shape(layer.init, jax.random.key(0))
    )
    result = jax.jit(layer.apply)(variables, X)
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5)


def test_layer_equals_mixtral():
    block = drawn("mixtral", "MixtralSparseMoeBlock", chosen=2)
    params = {**expert_weights(block.experts), **linears(router=block.gate)}
    check(block, MoeFeedForward(**SIZES), {"params": params})


def test_layer_equals_gpt_oss():
    block = drawn("gpt_oss", "GptOssMLP", chosen=3)
    experts, router = block.experts, block.router
    with torch.no_grad():
        experts.gate_up_proj *= 8.0  # so that the limit has an effect
    joined, bias = array(experts.gate_up_proj), array(experts.gate_up_proj_bias)
    params = {
        "gate": joined[..., ::2],
        "up": joined[..., 1::2],
        "down": array(experts.down_proj),
        "gate_bias": bias[..., ::2],
        "up_bias": bias[..., 1::2],
        "down_bias": array(experts.down_proj_bias),
        "router": {"w": array(router.weight).T, "b": array(router.bias)},
    }
    layer = MoeFeedForward(
        **SIZES,
        num_experts_per_token=3,
        use_bias=True,
        gate_limit=7.0,
        up_offset=1.0,
        activation_tpl=SiLU.HParams.config(beta=1.702),
        router_tpl=TopKRouter.HParams.config(use_bias=True),
    )
    check(block, layer, {"params": params})


@pytest.mark.parametrize(
    ("renormalize", "shared_dims"),
    [(False, 4 * HIDDEN), pytest.param(True, 15, marks=pytest.mark.slow)],
)
def test_layer_equals_qwen2_moe(renormalize, shared_dims):
    block = drawn(
        "qwen2_moe",
        "Qwen2MoeSparseMoeBlock",
        hidden="moe_intermediate_size",
        chosen=3,
        shared_expert_intermediate_size=shared_dims,
        num_experts=EXPERTS,
        norm_topk_prob=renormalize,
    )
    params = {
        **expert_weights(block.experts),
        **linears(router=block.gate, shared_gate=block.shared_expert_gate),
        "shared": shared_weights(block.shared_expert),
    }
    shared = {} if shared_dims == 4 * HIDDEN else {"hidden_dims": shared_dims}
    layer = MoeFeedForward(
        **SIZES,
        num_experts_per_token=3,
        num_shared_experts=4,
        shared_tpl=TransformerFeedForward.HParams.config(**shared),
        use_shared_gate=True,
        router_tpl=TopKRouter.HParams.config(renormalize=renormalize),
    )
    check(block, layer, {"params": params})


def test_layer_equals_deepseek_v3():
    block = drawn(
        "deepseek_v3",
        "DeepseekV3MoE",
        hidden="moe_intermediate_size",
        chosen=3,
        n_routed_experts=EXPERTS,
        n_shared_experts=2,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
        norm_topk_prob=True,
    )
    params = {
        **expert_weights(block.experts),
        **linears(router=block.gate),
        "shared": shared_weights(block.shared_experts),
    }
    router = TopKRouter.HParams.config(
        score="sigmoid",
        use_score_bias=True,
        num_expert_groups=4,
        num_chosen_groups=2,
        weight_scale=2.5,
    )
    layer = MoeFeedForward(
        **SIZES, num_experts_per_token=3, num_shared_experts=2, router_tpl=router
    )
    bias = {"router": {"score_bias": array(block.gate.e_score_correction_bias)}}
    check(block, layer, {"params": params, "non_trainable": bias})
