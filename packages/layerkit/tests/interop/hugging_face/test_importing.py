"""Tests of import: unsupported folders, memory of a host, and unusual folders."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from layerkit.base.sharding import DEFAULT_RULES, BoundSharding
from layerkit.config import build, target_of
from layerkit.errors import ConfigError
from layerkit.interop.hugging_face import (
    FAMILIES,
    TensorMismatchError,
    UnsupportedModelError,
    eos_id,
    import_model,
    load_weights,
    max_length,
    model_config,
    tokenizer_file,
)
from layerkit.interop.hugging_face.families import family_of
from layerkit.interop.hugging_face.families.gemma2 import GEMMA2
from layerkit.interop.hugging_face.families.llama import LLAMA
from layerkit.interop.hugging_face.families.qwen3 import QWEN3
from layerkit.interop.hugging_face.families.qwen3_moe import QWEN3_MOE
from layerkit.interop.hugging_face.families.t5 import T5
from layerkit.interop.hugging_face.importing import read_weights
from layerkit.interop.hugging_face.keys import all_layers, layer_templates
from layerkit.interop.hugging_face.tensors import dissect, pieces_of, their_shapes
from layerkit.layers.basic.elementwise import ReLU
from layerkit.layers.quantization.lora import LORA_WEIGHTS, add_lora
from layerkit.layers.transformer.residual_adapters import (
    RESIDUAL_ADAPTER_WEIGHTS,
    AdaptedFeedForward,
)


def test_import_of_the_package_imports_no_hugging_face_library():
    code = "import sys, layerkit, layerkit.models, layerkit.interop.hugging_face;"
    code += "print(sorted({'safetensors', 'transformers', 'torch'} & set(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout == "[]\n"


def test_t5_activation_and_start_token_are_those_of_transformers(configs):
    keys = {"feed_forward_proj": "gated-gelu", "dense_act_fn": "relu", "is_gated_act": False}
    model: Any = T5.read_config({**configs["t5"], **keys, "decoder_start_token_id": 7})
    feed_forward = model.model_tpl.decoder_stack_tpl.layer_tpl.feed_forward_tpl
    assert (target_of(feed_forward.activation_tpl), feed_forward.use_gate) == (ReLU, False)
    assert model.start_id == T5.write_config(model)["decoder_start_token_id"] == 7
    assert T5.read_config({**configs["t5"], "decoder_start_token_id": None}).start_id == 0


@pytest.mark.parametrize("keys", [{"torch_dtype": "torch.bfloat16"}, {"dtype": "bfloat16"}])
def test_stored_dtype_is_that_of_config_json(raises, make_folder, bfloat16, keys):
    folder = make_folder("llama", dtype=bfloat16, edit={"torch_dtype": None, **keys})
    assert import_model(folder)[0].dtype == "bfloat16"
    with raises(ConfigError, value="int8"):
        import_model(make_folder("llama", edit={"dtype": "int8"}))


def test_eos_id_is_that_of_generation_config_and_of_config(tmp_path):
    with pytest.raises(FileNotFoundError):
        eos_id(tmp_path)
    for name, content, expected in (
        ("config.json", {}, None),
        ("config.json", {"eos_token_id": 3}, 3),
        ("generation_config.json", {"eos_token_id": None}, 3),
        ("generation_config.json", {"eos_token_id": [4, 5]}, (4, 5, 3)),
        ("config.json", {"eos_token_id": [3, -1, 9], "vocab_size": 9}, (4, 5, 3)),
    ):
        (tmp_path / name).write_text(json.dumps(content))
        assert eos_id(tmp_path) == expected


def test_tokenizer_and_positions_are_those_of_the_folder(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert (tokenizer_file(tmp_path), max_length(tmp_path)) == (None, None)
    (tmp_path / "tokenizer.json").write_text("{}")
    for key in ("n_positions", "max_position_embeddings"):
        (tmp_path / "config.json").write_text(json.dumps({key: 64}))
        assert max_length(tmp_path) == 64
    assert tokenizer_file(tmp_path) == str(tmp_path / "tokenizer.json")


# Keys that do not change the computation; the table of each family gives the reasons.
INERT = {"architectures", "bos_token_id", "eos_token_id", "max_position_embeddings"}
INERT_OF = {"gptj": "n_positions"}  # since it has rotary positions


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model_type)
def test_each_key_changes_the_config_or_raises(configs, family):
    others = {"silu": "relu", "gelu_new": "relu", "gelu_pytorch_tanh": "relu"}
    content = configs[family.model_type]
    usual = family.read_config(content)
    for key, value in content.items():
        if key in {*INERT, "model_type", INERT_OF.get(family.model_type)}:
            continue
        other: Any = 5 if value is None else others.get(value) if isinstance(value, str) else None
        if key == "rope_scaling":
            other = {"rope_type": "linear", "factor": 2.0}
        elif key == "feed_forward_proj":
            other = "relu"
        elif key == "use_sliding_window":
            content = {**content, "max_window_layers": 1}
            usual, other = family.read_config(content), True
        elif isinstance(value, bool):
            other = not value
        elif isinstance(value, (int, float)):
            other = 2 * value or 0.5
        try:
            changed = family.read_config({**content, key: other})
        except UnsupportedModelError:
            continue
        # As text: to compare configs field by field takes fifty times as long.
        assert repr(changed) != repr(usual), key


# A decoder and an encoder in the ordinary tests.
PACKED = ["granite", "roberta"]
OTHERS = ["gemma", "smollm3", "gpt_neox", "stablelm", "olmo3", "bert", "modernbert", "bart"]
RECURRENT = ["granitemoehybrid", "mamba2", "nemotron_h", "falcon_h1", "olmo_hybrid", "lfm2"]
PACKED += [pytest.param(name, marks=pytest.mark.slow) for name in (*OTHERS, *RECURRENT)]


@pytest.mark.parametrize("family", PACKED)
def test_packed_rows_equal_separate_rows(make_folder, family):
    config, variables = import_model(make_folder(family), fprop_dtype="float32")
    model, ids = build(config), np.random.default_rng(0).integers(1, 12, (1, 11))

    @jax.jit
    def logits(ids, **packing):
        if family != "bart":
            return model.apply(variables, ids, method=lambda m, ids: m.lm.logits(ids, **packing))
        sides = {f"{side}_{k}": v for k, v in packing.items() for side in ("source", "target")}
        return model.apply(variables, ids, method=lambda m, x: m.model.logits(x, x, **sides))

    segments, positions = [[1] * 4 + [2] * 7], [[*range(4), *range(7)]]
    packed = logits(ids, segment_ids=np.array(segments), segment_pos=np.array(positions))
    separate = np.concatenate([logits(ids[:, :4]), logits(ids[:, 4:])], axis=1)
    np.testing.assert_allclose(packed, separate, atol=1e-5 * np.abs(separate).max())


def test_import_raises_with_all_differences_of_tensors(raises, make_folder):
    def change(tensors):
        tensors["model.layers.1.mlp.up_projj.weight"] = tensors.pop(
            "model.layers.1.mlp.up_proj.weight"
        )
        tensors["model.norm.weight"] = tensors["model.norm.weight"][:4]
        del tensors["lm_head.weight"]

    with raises(TensorMismatchError):
        import_model(make_folder("llama", change=change))


def test_gpt2_is_read_without_prefix_and_with_buffers(make_folder):
    whole = import_model(make_folder("gpt2"))[1]

    def change(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        tensors["h.0.attn.bias"] = np.ones((1, 1, 4, 4), np.float32)
        tensors["h.0.attn.masked_bias"] = np.float32(-1e4).reshape(1)

    bare = import_model(make_folder("gpt2", change=change))[1]
    jax.tree.map(np.testing.assert_array_equal, bare, whole)


def test_copy_of_a_tied_tensor_raises_unless_it_is_equal(raises, make_folder):
    def copy(tensors):
        tensors["lm_head.weight"] = tensors["transformer.wte.weight"].copy()

    def differ(tensors):
        copy(tensors)
        tensors["lm_head.weight"][3, 2] += 1

    import_model(make_folder("gpt2", change=copy))
    with raises(TensorMismatchError):
        import_model(make_folder("gpt2", change=differ))


# Families whose tables name their copies differently; most others name them as Llama does.
OWN_COPIES = ("gpt2", "llama", "gpt_neox", "mamba2", "t5", "bart", "bert", "whisper")
TIED = [
    pytest.param(family, marks=[pytest.mark.slow] * (family.model_type not in OWN_COPIES))
    for family in FAMILIES
    if family.copies
]


@pytest.mark.parametrize("family", TIED, ids=lambda family: family.model_type)
def test_tied_tensor_is_read_under_any_of_its_names_alone(make_folder, family):
    tied = {"tie_word_embeddings": True} | ({"scale_decoder_outputs": True} if family is T5 else {})
    whole = import_model(make_folder(family.model_type, **tied))[1]
    for copy, original in family.copies.items():

        def rename(tensors, copy=copy, original=original):
            tensors[copy] = tensors.pop(original)

        alone = import_model(make_folder(family.model_type, change=rename, **tied))[1]
        jax.tree.map(np.testing.assert_array_equal, alone, whole)


def test_t5_without_a_head_has_the_embedding_in_its_place(make_folder):
    def change(tensors):
        del tensors["lm_head.weight"]

    weights = import_model(make_folder("t5", change=change))[1]["params"]["model"]
    np.testing.assert_array_equal(weights["softmax"]["w"], weights["embedding"]["w"].T)


def test_bert_with_a_pooler_and_older_names_of_norms_is_read(make_folder):
    def change(tensors):
        for name in [name for name in tensors if "LayerNorm" in name]:
            older = {"weight": "gamma", "bias": "beta"}
            stem, _, kind = name.rpartition(".")
            tensors[f"{stem}.{older[kind]}"] = tensors.pop(name)
        tensors["bert.pooler.dense.weight"] = tensors["cls.seq_relationship.weight"] = np.ones(3)
        tensors["bert.embeddings.position_ids"] = np.arange(16)

    whole = import_model(make_folder("bert"))[1]
    older = import_model(make_folder("bert", change=change))[1]
    jax.tree.map(np.testing.assert_array_equal, older, whole)


def test_bart_without_prefix_and_with_a_bias_of_zeros_is_read(make_folder):
    def change(tensors, bias=0.0):
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)
        tensors["encoder.embed_tokens.weight"] = tensors["shared.weight"]
        tensors["final_logits_bias"] = np.full((1, 12), bias, np.float32)

    whole = import_model(make_folder("bart"))[1]
    bare = import_model(make_folder("bart", change=change))[1]
    jax.tree.map(np.testing.assert_array_equal, bare, whole)
    with pytest.raises(TensorMismatchError, match="final_logits_bias: unexpected"):
        import_model(make_folder("bart", change=lambda tensors: change(tensors, bias=1.0)))


def test_gpt_neox_with_the_head_of_transformers_5_is_read(make_folder):
    def rename(tensors):
        tensors["lm_head.weight"] = tensors.pop("embed_out.weight")

    whole = import_model(make_folder("gpt_neox"))[1]
    renamed = import_model(make_folder("gpt_neox", change=rename))[1]
    jax.tree.map(np.testing.assert_array_equal, renamed, whole)


def test_mixed_dtypes_in_one_weight_require_dtype(raises, make_folder, bfloat16):
    def change(tensors):
        name = "model.layers.0.input_layernorm.weight"
        tensors[name] = tensors[name].astype(bfloat16)

    folder = make_folder("llama", change=change)
    with raises(TensorMismatchError, value=["bfloat16", "float32"]):
        import_model(folder)
    import_model(folder, repeated=False)
    assert import_model(folder, dtype="float32")[0].dtype == "float32"


def test_unsupported_stored_dtype_requires_dtype(raises, make_folder):
    folder = make_folder("gpt2", dtype=np.float64)
    with raises(TensorMismatchError, value=["float64"]):
        load_weights(folder, build(model_config(folder)))
    assert import_model(folder, dtype="float32")[0].dtype == "float32"


def test_missing_key_has_the_default_of_transformers(configs):
    content = configs["gemma2"]
    caps = ("attn_logit_softcapping", "final_logit_softcapping")
    shorter = {key: value for key, value in content.items() if key not in caps}
    assert GEMMA2.read_config(shorter) == GEMMA2.read_config(content)
    assert [content[cap] for cap in caps] == [50.0, 30.0]


@pytest.mark.parametrize(("family", "first_near"), [("qwen2", 28), ("qwen2_5_vl", 80)])
def test_windows_of_qwen_start_in_the_layer_of_transformers(configs, family, first_near):
    sizes = {"use_sliding_window": True, "num_hidden_layers": first_near + 1}
    content = {**configs[family], **sizes}
    content["text_config"] = {**content.get("text_config", {}), **sizes}
    del content["text_config" if family == "qwen2" else "use_sliding_window"]
    for keys in (content, content.get("text_config", {})):
        keys.pop("max_window_layers", None)
    layers = all_layers(family_of(family).read_config(content).lm_tpl)
    windows = [layer.attention_tpl.window for layer in layers]
    assert windows[:-1] == [None] * first_near and windows[-1] is not None


@pytest.mark.parametrize("family", ["gemma3", "qwen3_5"])
def test_part_that_is_no_object_raises(raises, configs, family):
    with raises(UnsupportedModelError, field="vision_config", value=[None]):
        family_of(family).read_config({**configs[family], "vision_config": [None]})


@pytest.mark.parametrize(("family", "num_layers"), [("mixtral", 3), ("qwen3_moe", 2)])
def test_balance_loss_is_divided_by_the_number_of_layers_with_experts(configs, family, num_layers):
    # Two choices of a token; Transformers adds one loss over all layers.
    model = family_of(family).read_config(configs[family])
    experts = layer_templates(model.lm_tpl)[0].feed_forward_tpl
    assert experts.load_balance_weight == pytest.approx(0.02 * 2 / num_layers)
    assert family_of(family).write_config(model)["router_aux_loss_coef"] == 0.02


@pytest.mark.parametrize("repeated", [True, False])
def test_dense_layers_among_experts_are_those_of_config_json(make_folder, repeated):
    keys = {"num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [5]}
    model, _ = import_model(make_folder("qwen3_moe", **keys), repeated=repeated)
    pieces = pieces_of(dissect(build(model), QWEN3_MOE.rows), QWEN3_MOE.rows)
    gates = {piece.name: piece.shape for piece in pieces if ".mlp." in piece.name}
    dense = [n for n in range(6) if f"model.layers.{n}.mlp.gate_proj.weight" in gates]
    assert dense == QWEN3_MOE.write_config(model)["mlp_only_layers"] == [0, 2, 4, 5]
    assert gates["model.layers.4.mlp.gate_proj.weight"] == (8, 10)
    assert gates["model.layers.3.mlp.experts.2.gate_proj.weight"] == (8, 6)


@pytest.mark.parametrize(
    ("family", "renamed", "other"),
    [
        ("llama4", ("", "language_model."), "vision_model.class_embedding"),
        ("gemma4", ("model.", "model.language_model."), "model.vision_tower.std_bias"),
    ],
)
def test_text_of_a_folder_of_text_and_images_is_read(make_folder, family, renamed, other):
    config, variables = import_model(make_folder(f"{family}_text"))

    def change(tensors):
        for name in list(tensors):
            tensors[name.replace(*renamed, 1)] = tensors.pop(name)
        tensors[other] = np.ones(3, np.float32)

    folder = make_folder(f"{family}_text", change=change)
    content = {"text_config": json.loads((folder / "config.json").read_text())}
    content |= {"model_type": family, "vision_config": {"hidden_size": 8}}
    (folder / "config.json").write_text(json.dumps(content))
    again = import_model(folder)
    assert again[0] == config
    jax.tree.map(np.testing.assert_array_equal, again[1], variables)


@pytest.mark.slow
def test_names_of_newer_folders_of_qwen2_5_vl_are_read(make_folder):
    config, variables = import_model(make_folder("qwen2_5_vl"))

    def change(tensors):
        for name in list(tensors):
            newer = name.replace("model.", "model.language_model.", 1)
            newer = name.replace("visual.", "model.visual.") if "visual." in name else newer
            tensors[newer] = tensors.pop(name)

    again = import_model(make_folder("qwen2_5_vl", change=change))
    assert again[0] == config
    jax.tree.map(np.testing.assert_array_equal, again[1], variables)


def test_experts_in_one_tensor_are_those_of_separate_tensors(make_folder):
    config, variables = import_model(make_folder("qwen3_5_moe_text"))

    def fuse(tensors):
        for layer in range(2):
            start = f"model.layers.{layer}.mlp.experts."
            gate, up, down = (
                np.stack(
                    [tensors.pop(f"{start}{expert}.{name}_proj.weight") for expert in range(3)]
                )
                for name in ("gate", "up", "down")
            )
            tensors[start + "gate_up_proj"] = np.concatenate([gate, up], axis=1)
            tensors[start + "down_proj"] = down
        tensors["mtp.fc.weight"] = np.ones((8, 16), np.float32)

    again = import_model(make_folder("qwen3_5_moe_text", change=fuse))
    assert again[0] == config
    jax.tree.map(np.testing.assert_array_equal, again[1], variables)


@pytest.mark.parametrize("experts", [{"num_experts": 0}, {"mlp_only_layers": [0, 1, 2]}])
def test_mixture_without_experts_is_read_as_the_dense_family(configs, experts):
    content = configs["qwen3_moe"]
    dense = QWEN3.read_config({**configs["qwen3"], "rms_norm_eps": content["rms_norm_eps"]})
    assert QWEN3_MOE.read_config({**content, **experts}) == dense


# The two heads that share a key are on two devices of four.
@pytest.mark.parametrize(("family", "axis", "devices"), [("mixtral", -1, 2), ("qwen3_next", -2, 4)])
def test_weights_have_the_sharding_and_dtype_of_like(make_folder, family, axis, devices):
    folder = make_folder(family)
    model = build(model_config(folder))
    mesh = Mesh(np.reshape(jax.devices()[:4], (devices, -1)), ("fsdp", "tensor"))

    def place(leaf):
        spec = [None] * leaf.ndim
        if leaf.ndim >= -axis and leaf.shape[axis] % devices == 0:
            spec[axis] = "fsdp"
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(leaf.shape, np.float16, sharding=sharding)

    like = jax.tree.map(place, jax.eval_shape(model.init, jax.random.key(0)))
    sharded, whole = load_weights(folder, model, like=like), load_weights(folder, model)
    for ours, required, plain in zip(*map(jax.tree.leaves, (sharded, like, whole)), strict=True):
        assert (ours.sharding, ours.dtype) == (required.sharding, np.float16)
        np.testing.assert_array_equal(ours, np.asarray(plain).astype(np.float16))


class CountingSource:
    """A source of zeros that records which tensors are read."""

    def __init__(self, shapes):
        self.shapes, self.reads = shapes, list[str]()

    def names(self):
        return list(self.shapes)

    def shape(self, name):
        return self.shapes[name]

    def dtype(self, name):
        return np.dtype(np.float32)

    def read(self, name, ranges):
        self.reads.append(name)
        return np.broadcast_to(np.float32(0), [stop - start for start, stop in ranges])


def read_with_peak(monkeypatch, layers, place):
    """Return the bytes of the peak of host memory, and of all weights."""
    import tracemalloc

    content = {"vocab_size": 64, "hidden_size": 128, "intermediate_size": 512, "head_dim": 32}
    content |= {"num_hidden_layers": layers, "num_attention_heads": 4, "model_type": "llama"}
    model = build(LLAMA.read_config(content))
    anatomy = dissect(model, LLAMA.rows)
    source = CountingSource(their_shapes(pieces_of(anatomy, LLAMA.rows)))
    like = jax.tree.map(place, jax.eval_shape(model.init, jax.random.key(0)))
    read_weights(source, LLAMA, anatomy, like=like)  # fills caches of JAX first
    kept: list[Any] = []
    make = jax.make_array_from_callback

    def make_and_release(shape, sharding, read):
        """Release blocks when they are read, as copies to an accelerator do."""
        devices = sharding.addressable_devices_indices_map(shape)
        read(next(iter(devices.values())))
        return kept

    monkeypatch.setattr(jax, "make_array_from_callback", make_and_release)
    tracemalloc.start()
    try:
        read_weights(source, LLAMA, anatomy, like=like)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        monkeypatch.setattr(jax, "make_array_from_callback", make)
    return {
        "peak": peak,
        "all": 4 * layers * (3 * 128 * 512 + 4 * 128 * 128),
    }


def test_replicas_of_a_slice_are_read_once():
    content = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "model_type": "llama"}
    content |= {"num_hidden_layers": 2, "num_attention_heads": 2}
    model = build(LLAMA.read_config(content))
    anatomy = dissect(model, LLAMA.rows)
    source = CountingSource(their_shapes(pieces_of(anatomy, LLAMA.rows)))
    mesh = Mesh(np.reshape(jax.devices(), (4, 2)), ("data", "fsdp"))

    def place(leaf):
        spec = PartitionSpec(*[None] * (leaf.ndim - 1), "fsdp")
        sharding = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    like = jax.tree.map(place, jax.eval_shape(model.init, jax.random.key(0)))
    read_weights(source, LLAMA, anatomy, like=like)
    # Two slices of each weight, and a tensor of each of two layers in those that are stacked.
    assert len(source.reads) == 2 * (3 + 2 * 9)


EXPERTS = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2}
EXPERTS |= {"moe_intermediate_size": 6, "num_global_key_value_heads": 2}
# More layers of so large weights would magnify rounding.
EXPERTS |= {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
SMALL = {"hidden_size_per_layer_input": 6, "vocab_size_per_layer_input": 12}
SMALL |= {"num_kv_shared_layers": 2, "use_double_wide_mlp": True, "attention_k_eq_v": False}
MESH_CASES: list[Any] = [("cohere", "context", {}), ("stablelm", "context", {})]
# Their layers take long to compile.
MESH_CASES += [
    pytest.param(*case, marks=pytest.mark.slow)
    for case in (
        ("gemma4_text", "context", {}),
        ("gemma4_text", "expert", EXPERTS),
        ("gemma4_text", "context", SMALL),
        ("qwen3_5_text", "context", {}),
    )
]


def test_surplus_keys_and_values_raise_unless_a_layer_reads_those_of_others(make_folder):
    keys = {**SMALL, "num_hidden_layers": 4, "attention_k_eq_v": True}
    keys |= {"layer_types": ["sliding_attention", "full_attention"] * 2}

    def add(tensors, layer=3, names=("k_proj", "v_proj", "k_norm")):
        more = {f"model.layers.{layer}.self_attn.{name}.weight": np.ones(3) for name in names}
        tensors.update(more)

    whole = import_model(make_folder("gemma4_text", **keys))[1]
    more = import_model(make_folder("gemma4_text", change=add, **keys))[1]
    jax.tree.map(np.testing.assert_array_equal, more, whole)
    # The values of this layer are its keys.
    folder = make_folder("gemma4_text", change=lambda tensors: add(tensors, 1, ["v_proj"]), **keys)
    with pytest.raises(TensorMismatchError, match=r"layers\.1\.self_attn\.v_proj.* unexpected"):
        import_model(folder)


@pytest.mark.parametrize(("family", "axis", "keys"), MESH_CASES)
def test_logits_of_a_mesh_are_those_of_one_device(make_folder, family, axis, keys):
    config, variables = import_model(make_folder(family, num_key_value_heads=4, **keys))
    ids = np.random.default_rng(0).integers(1, 12, (4, 8))

    def logits(**fields):
        model = build(config).clone(**fields)
        run = jax.jit(lambda v: model.apply(v, ids, method=lambda m, x: m.lm.logits(x)))
        return run(variables)

    mesh = Mesh(np.reshape(jax.devices(), (2, 2, 2)), ("fsdp", "tensor", axis))
    sharded, whole = logits(sharding=BoundSharding(mesh, DEFAULT_RULES)), logits()
    np.testing.assert_allclose(sharded, whole, atol=1e-5 * np.abs(whole).max())


def test_host_memory_holds_one_slice_and_one_block(monkeypatch):
    mesh = Mesh(jax.devices(), ("fsdp",))

    def place(leaf):
        # As rules do: never along the layers, here along the last axis that can be split.
        splits = [i for i, size in enumerate(leaf.shape) if size % 8 == 0 and i > 0]
        spec = ["fsdp" if splits and i == splits[-1] else None for i in range(len(leaf.shape))]
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    layers = 64
    result = read_with_peak(monkeypatch, layers, place)
    layer = 4 * 128 * 512
    # Beside the slice of all layers: the block, its transpose, and the table of tensors.
    assert result["peak"] < layers * layer / 8 + 2 * layer + 500_000
    assert result["peak"] < result["all"] / 16


@pytest.mark.parametrize("kind", ["lora", "adapter"])
def test_weights_of_adapters_are_not_loaded(raises, make_folder, kind):
    folder = make_folder("llama")
    config = model_config(folder)
    if kind == "lora":
        config = add_lora(config, rank=2)
    else:
        layer = config.lm_tpl.stack_tpl.layer_tpl
        layer.feed_forward_tpl = layer.feed_forward_tpl.with_class(AdaptedFeedForward)
    model = build(config)
    like = jax.eval_shape(model.init, jax.random.key(0))["params"]
    fresh = (LORA_WEIGHTS, RESIDUAL_ADAPTER_WEIGHTS)
    loaded = load_weights(folder, model, like={"params": like}, fresh=fresh)["params"]
    names = {jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(loaded)}
    assert not any(kind in name for name in names)
    assert "['lm']['stack']['repeat']['sub']['attention']['query']['w']" in names
    with raises(TensorMismatchError):
        load_weights(folder, model)


def test_modules_of_multi_token_prediction_can_be_left_out(make_folder):
    whole = make_folder("deepseek_v3")
    config, variables = import_model(whole)
    assert config.lm_tpl.mtp_tpl.depth == 1
    config.lm_tpl.mtp_tpl = None
    smaller = load_weights(whole, build(config))
    assert "mtp" in variables["params"]["lm"] and "mtp" not in smaller["params"]["lm"]

    def without(tensors):
        for name in [name for name in tensors if name.startswith("model.layers.3.")]:
            del tensors[name]

    folder = make_folder("deepseek_v3", change=without)
    imported, again = import_model(folder)
    assert imported.lm_tpl.mtp_tpl is None
    jax.tree.map(np.testing.assert_array_equal, again, smaller)

    def damage(tensors):
        tensors["model.layers.3.embed_tokens.weight"] = -tensors["model.embed_tokens.weight"]

    with pytest.raises(TensorMismatchError, match="same values as model.embed_tokens"):
        import_model(make_folder("deepseek_v3", change=damage))
