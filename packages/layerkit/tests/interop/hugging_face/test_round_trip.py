"""Tests that import and export give back all tensors bitwise and an equivalent config.json."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest

from layerkit.config import build
from layerkit.interop.hugging_face import FAMILIES, export_model, import_model, model_config

NAMES = [family.model_type for family in FAMILIES]


EXPERTS = {"enable_moe_block": True, "num_experts": 5, "top_k_experts": 2}
EXPERTS |= {"moe_intermediate_size": 6}
SMALL = {"hidden_size_per_layer_input": 6, "vocab_size_per_layer_input": 12}
SMALL |= {"num_kv_shared_layers": 2, "use_double_wide_mlp": True}
# One family of each kind in the ordinary tests.
KINDS = ("gpt2", "llama", "deepseek_v3", "gemma2", "mamba2", "t5", "bert", "clip")
CASES = [
    pytest.param(name, True, {}, marks=[pytest.mark.slow] * (name not in KINDS)) for name in NAMES
]
CASES += [("gpt2", False, {})]
CASES += [
    pytest.param(*case, marks=pytest.mark.slow)
    for case in (
        ("gemma3_text", False, {}),
        ("gemma4_text", True, EXPERTS),
        ("gemma4_text", True, SMALL),
    )
]


@pytest.mark.parametrize(("family", "repeated", "keys"), CASES)
def test_every_tensor_comes_back(
    family, repeated, keys, make_folder, read_tensors, bfloat16, tmp_path
):
    folder, again = make_folder(family, dtype=bfloat16, **keys), tmp_path / "again"
    model, variables = import_model(folder, repeated=repeated)
    drawn = jax.eval_shape(build(model).init, jax.random.key(0))
    assert described(variables) == described(drawn)
    export_model(again, model, variables, tokenizer_folder=folder)
    before, after = read_tensors(folder), read_tensors(again)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert (after[name].dtype, after[name].shape) == (tensor.dtype, tensor.shape), name
        assert after[name].tobytes() == tensor.tobytes(), name
    assert model_config(again, repeated=repeated) == model_config(folder, repeated=repeated)
    written = json.loads((again / "config.json").read_text())
    assert (written["model_type"], written["torch_dtype"]) == (family, "bfloat16")


def described(tree):
    return jax.tree.map(lambda leaf: (leaf.shape, np.dtype(leaf.dtype).name), tree)


def test_repeated_and_unrolled_hold_the_same_layers(make_folder):
    folder = make_folder("gemma3_text")
    _, repeated = import_model(folder)
    _, unrolled = import_model(folder, repeated=False)
    stack, layers = repeated["params"]["lm"]["stack"], unrolled["params"]["lm"]["stack"]
    # Two periods of two, and the fifth layer.
    assert sorted(stack) == ["remainder_0", "repeat"]
    third = jax.tree.map(lambda leaf: leaf[1], stack["repeat"]["sub"]["layers_0"])
    jax.tree.map(np.testing.assert_array_equal, third, layers["layers_2"])
    jax.tree.map(np.testing.assert_array_equal, stack["remainder_0"], layers["layers_4"])


def test_names_and_shapes_of_gpt2_are_those_of_its_folders(make_folder, read_tensors):
    shapes = {name: tensor.shape for name, tensor in read_tensors(make_folder("gpt2")).items()}
    layer = {
        "attn.c_attn.weight": (8, 24),
        "attn.c_attn.bias": (24,),
        "attn.c_proj.weight": (8, 8),
        "attn.c_proj.bias": (8,),
        "ln_1.weight": (8,),
        "ln_1.bias": (8,),
        "ln_2.weight": (8,),
        "ln_2.bias": (8,),
        "mlp.c_fc.weight": (8, 32),
        "mlp.c_fc.bias": (32,),
        "mlp.c_proj.weight": (32, 8),
        "mlp.c_proj.bias": (8,),
    }
    expected = {f"transformer.h.{i}.{name}": layer[name] for i in range(3) for name in layer}
    expected |= {"transformer.wte.weight": (12, 8), "transformer.wpe.weight": (16, 8)}
    expected |= {"transformer.ln_f.weight": (8,), "transformer.ln_f.bias": (8,)}
    assert shapes == expected


def test_a_dtype_can_be_asked_for(make_folder, bfloat16):
    model, variables = import_model(make_folder("llama"), dtype="bfloat16", fprop_dtype="float32")
    assert {leaf.dtype for leaf in jax.tree.leaves(variables)} == {np.dtype(bfloat16)}
    assert (model.dtype, model.fprop_dtype) == ("bfloat16", "float32")
