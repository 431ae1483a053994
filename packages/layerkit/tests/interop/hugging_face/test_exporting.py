"""Tests of export: choice of the family, files and unsupported models."""

from __future__ import annotations

import functools
import json
import os
import stat

import jax
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from layerkit.config import build
from layerkit.config.nested_map import NestedMap
from layerkit.interop.hugging_face import (
    TensorMismatchError,
    UnsupportedModelError,
    export_model,
    exporting,
    import_model,
    load_weights,
    model_config,
)
from layerkit.layers import Embedding, FullSoftmax, RmsNorm, RotaryPositionalEmbedding, SiLU
from layerkit.layers.basic.dots import replace_dots
from layerkit.layers.quantization.current_scaling import Fp8CurrentDot, Int8Dot
from layerkit.layers.quantization.fp8 import Fp8Dot
from layerkit.layers.quantization.lora import add_lora
from layerkit.layers.quantization.mxfp8 import MxFp8Dot
from layerkit.layers.quantization.nvfp4 import NvFp4Dot
from layerkit.layers.transformer.pipelined_transformer import PipelinedTransformer
from layerkit.models import (
    DistillationModel,
    LanguageModel,
    PreferenceModel,
    RewardModel,
    TransformerLm,
)

pytest.importorskip("safetensors")


def llama_by_hand(**attention):
    """Return a Llama made of layers, with training options that export ignores."""
    lm = TransformerLm.HParams.config(
        vocab_size=12,
        model_dims=8,
        hidden_dims=10,
        num_layers=2,
        num_heads=2,
        softmax_tpl=FullSoftmax.HParams.config(chunk_size=4, z_loss_weight=1e-4),
        embedding_tpl=Embedding.HParams.config(),
        final_norm_tpl=RmsNorm.HParams.config(),
        dropout_rate=0.0,
    )
    layer = lm.stack_tpl.layer_tpl
    layer.norm_tpl = RmsNorm.HParams.config()
    layer.feed_forward_tpl.set(use_gate=True, activation_tpl=SiLU.HParams.config())
    layer.attention_tpl.set(
        rotary_tpl=RotaryPositionalEmbedding.HParams.config(max_timescale=5e5), **attention
    )
    return LanguageModel.HParams.config(lm_tpl=lm)


@pytest.fixture(scope="module")
def by_hand():
    """Return `llama_by_hand()` with initial weights."""
    model = llama_by_hand()
    return model, jax.jit(build(model).init)(jax.random.key(0))


def test_family_of_a_custom_model_is_found(by_hand, tmp_path):
    model, variables = by_hand
    export_model(tmp_path, model, variables)
    content = json.loads((tmp_path / "config.json").read_text())
    assert (content["model_type"], content["architectures"]) == ("llama", ["LlamaForCausalLM"])
    assert (content["rope_theta"], content["num_key_value_heads"]) == (5e5, 2)
    assert content["head_dim"] == 4
    jax.tree.map(np.testing.assert_array_equal, load_weights(tmp_path, build(model)), variables)


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640)])
def test_exported_files_have_permissions_by_umask(by_hand, tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        export_model(tmp_path, *by_hand, max_shard_bytes=1)
    finally:
        os.umask(before)
    result = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert {name.split("-")[0].split(".")[0] for name in result} == {"config", "model"}
    assert set(result.values()) == {mode}, result


def test_llama_with_a_window_is_exported_as_mistral(by_hand, tmp_path):
    export_model(tmp_path, llama_by_hand(window=4), by_hand[1])
    content = json.loads((tmp_path / "config.json").read_text())
    assert (content["model_type"], content["sliding_window"]) == ("mistral", 4)


def test_chat_templates_of_the_folder_are_copied(make_folder, by_hand, tmp_path):
    names = ("chat_template.jinja", "additional_chat_templates/tool_use.jinja")
    folder = make_folder("llama")
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(name)
    export_model(tmp_path / "out", *by_hand, tokenizer_folder=folder)
    assert [(tmp_path / "out" / name).read_text() for name in names] == [*names]


def test_token_ids_beyond_the_vocabulary_are_not_carried_over(make_folder, by_hand, tmp_path):
    ids = {"bos_token_id": 1, "eos_token_id": [2, 12], "pad_token_id": 32000}
    export_model(tmp_path, *by_hand, tokenizer_folder=make_folder("llama", edit=ids))
    content = json.loads((tmp_path / "config.json").read_text())
    assert {key: content[key] for key in ids} == {**ids, "eos_token_id": [2], "pad_token_id": None}


def test_model_of_no_family_raises_with_the_nearest(raises, tmp_path):
    model = llama_by_hand(per_dim_scale=True)
    variables = jax.jit(build(model).init)(jax.random.key(0))
    with raises(UnsupportedModelError, field="nearest family", value="llama"):
        export_model(tmp_path, model, variables)
    assert list(tmp_path.iterdir()) == []


def dpo(lm, reference):
    return PreferenceModel.HParams.config(lm_tpl=lm, reference=reference)


SETUPS = {
    "bare": llama_by_hand().lm_tpl,
    "lora": add_lora(llama_by_hand(), rank=2, only=".*(query|value|up)_tpl"),
    "bare_lora": add_lora(llama_by_hand().lm_tpl, rank=2),
    "dpo_frozen": dpo(llama_by_hand().lm_tpl, "frozen"),
    "dpo_batch": dpo(llama_by_hand().lm_tpl, "batch"),
    "distilled": DistillationModel.HParams.config(
        lm_tpl=llama_by_hand().lm_tpl, teacher_tpl=llama_by_hand().lm_tpl, features=((0, 0),)
    ),
    "dpo_lora": dpo(add_lora(llama_by_hand().lm_tpl, rank=2), "frozen"),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name != "dpo_lora")) for name in SETUPS],
)
def test_export_of_a_training_setup_writes_the_deployed_model(name, tmp_path):
    model, ids = build(SETUPS[name]), np.arange(10)[None] % 12
    # Initial adapters would be 0, and the initial policy would equal its reference.
    random = np.random.default_rng(1)
    shapes = nn.unbox(jax.eval_shape(model.init, jax.random.key(0)))
    draw = lambda x: random.normal(0, 0.3, x.shape).astype(np.float32)  # noqa: E731
    variables = jax.tree.map(draw, shapes)

    def logits(model, variables):
        def network(each):
            return each if isinstance(each, TransformerLm) else each.lm

        run = jax.jit(lambda v: model.apply(v, ids, method=lambda m, x: network(m).logits(x)))
        return np.asarray(run(variables))

    export_model(tmp_path, SETUPS[name], variables)
    config, read = import_model(tmp_path)
    expected = logits(model, variables)
    np.testing.assert_allclose(logits(build(config), read), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_reward_model_is_exported_as_a_classifier_of_transformers(name, make_folder, tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    folder = make_folder(name, edit={"pad_token_id": 0, "architectures": None})
    lm, variables = import_model(folder)
    reward = RewardModel.HParams.config(lm_tpl=lm.lm_tpl)
    score = np.random.default_rng(0).normal(size=(8, 1)).astype(np.float32)
    variables["params"]["score"] = {"w": score}
    # Each row holds all tokens in `ids`; the last one is no label, so its segment is padding.
    ids = np.array(
        [[1, 3, 4, 5, 6, 0], [1, 3, 4, 7, 0, 0], [1, 3, 8, 9, 2, 5], [1, 10, 0, 0, 0, 0]]
    )
    lengths = (ids > 0).sum(1, keepdims=True)
    rows = NestedMap(ids=ids, labels=ids, weights=ids > 0)
    rows.segment_ids = (np.arange(6) < lengths - 1).astype(np.int32)
    sides = {"chosen": slice(2), "rejected": slice(2, 4)}
    batch = NestedMap({side: jax.tree.map(lambda x, n=n: x[n], rows) for side, n in sides.items()})
    predict = functools.partial(build(reward).apply, method="compute_predictions")
    rewards = jax.jit(predict)(variables, batch).rewards
    export_model(tmp_path / "out", reward, variables, tokenizer_folder=folder)
    model, report = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not any(report.values()) and model.config.num_labels == 1
    assert model.config.architectures == [type(model).__name__]
    with torch.no_grad():
        expected = model(torch.tensor(ids)).logits[:, 0].numpy()
    np.testing.assert_allclose(rewards.reshape(-1), expected, rtol=1e-5, atol=1e-5)


def test_family_argument_selects_the_family(make_folder, tmp_path):
    # Without a window and with separate projections, Phi 3 computes what Llama computes.
    model, variables = import_model(make_folder("phi3"))
    for family in ("llama", "phi3"):
        export_model(tmp_path / family, model, variables, family=family)
        content = json.loads((tmp_path / family / "config.json").read_text())
        assert content["model_type"] == family


def test_variables_of_another_model_raise(raises, make_folder, tmp_path):
    model, variables = import_model(make_folder("gpt2"))
    del variables["params"]["lm"]["position"]
    with raises(TensorMismatchError, value=(["params/lm/position/w"], [])):
        export_model(tmp_path, model, variables)


def test_tensors_in_several_files_are_read_back(make_folder, read_tensors, tmp_path):
    folder, again = make_folder("llama"), tmp_path / "again"
    model, variables = import_model(folder)
    export_model(again, model, variables, max_shard_bytes=1500)
    files = sorted(path.name for path in again.glob("*.safetensors"))
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert len(files) > 2
    index = json.loads((again / "model.safetensors.index.json").read_text())
    tensors = read_tensors(folder)
    assert index["weight_map"].keys() == tensors.keys()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    for file in files:
        size = sum(tensors[name].nbytes for name, of in index["weight_map"].items() if of == file)
        assert size <= 1500
    jax.tree.map(np.testing.assert_array_equal, import_model(again)[1], variables)


@pytest.mark.parametrize(("first", "second"), [(1500, 10**9), (10**9, 1500), (1500, 3000)])
def test_export_replaces_tensors_of_an_earlier_export(make_folder, tmp_path, first, second):
    again = tmp_path / "again"
    model, variables = import_model(make_folder("llama"))
    export_model(again, model, variables, max_shard_bytes=first)
    newer = jax.tree.map(lambda weight: 2 * weight, variables)
    export_model(again, model, newer, max_shard_bytes=second)
    jax.tree.map(np.testing.assert_array_equal, import_model(again)[1], newer)
    files = {path.name for path in again.glob("model*.safetensors")}
    index = again / "model.safetensors.index.json"
    if index.exists():
        assert files == set(json.loads(index.read_text())["weight_map"].values())
    else:
        assert files == {"model.safetensors"}


def test_export_to_the_tokenizer_folder_raises(raises, make_folder):
    folder = make_folder("llama")
    model, variables = import_model(folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with raises(FileExistsError):
        export_model(folder, model, variables, tokenizer_folder=str(folder) + "/.")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize("dot", [Fp8Dot, Fp8CurrentDot, Int8Dot, MxFp8Dot, NvFp4Dot])
def test_weights_of_rounding_products_are_not_rounded(make_folder, tmp_path, dot):
    model, variables = import_model(make_folder("llama"))
    export_model(tmp_path / "again", replace_dots(model, dot.HParams.config()), variables)
    again, weights = import_model(tmp_path / "again")
    assert again == model
    jax.tree.map(np.testing.assert_array_equal, weights, variables)


@pytest.mark.parametrize(("family", "circular_repeats"), [("gpt2", 1), ("gemma3_text", 2)])
def test_export_of_a_pipeline_equals_export_of_its_stack(
    make_folder, read_tensors, tmp_path, family, circular_repeats
):
    depth = {"gpt2": {"n_layer": 4}, "gemma3_text": {"num_hidden_layers": 8}}[family]
    folder, again = make_folder(family, **depth), tmp_path / "again"
    model = model_config(folder)
    stack = model.lm_tpl.stack_tpl
    model.lm_tpl.stack_tpl = PipelinedTransformer.HParams.config(
        layer_tpl=stack.layer_tpl,
        block_tpls=stack.block_tpls,
        num_stages=2,
        num_microbatches=2,
        circular_repeats=circular_repeats,
    )
    export_model(again, model, load_weights(folder, build(model)), tokenizer_folder=folder)
    before, after = read_tensors(folder), read_tensors(again)
    assert {k: v.tobytes() for k, v in before.items()} == {k: v.tobytes() for k, v in after.items()}
    assert model_config(again) == model_config(folder)


@pytest.mark.parametrize("on_cpu", [True, False], ids=["cpu", "accelerator"])
def test_export_of_sharded_weights_equals_the_original(
    make_folder, read_tensors, tmp_path, monkeypatch, on_cpu
):
    # Weights of accelerators, and of several hosts, are gathered layer by layer.
    monkeypatch.setattr(exporting, "_is_on_hosts_cpu", lambda leaf: on_cpu)
    folder, again = make_folder("mixtral"), tmp_path / "again"
    model, variables = import_model(folder)
    mesh = Mesh(jax.devices()[:2], ("fsdp",))

    def split(leaf):
        last = "fsdp" if leaf.shape[-1] % 2 == 0 else None
        spec = PartitionSpec(*[None] * (leaf.ndim - 1), last)
        return jax.device_put(leaf, NamedSharding(mesh, spec))

    export_model(again, model, jax.tree.map(split, variables), tokenizer_folder=folder)
    before, after = read_tensors(folder), read_tensors(again)
    assert {k: v.tobytes() for k, v in before.items()} == {k: v.tobytes() for k, v in after.items()}


def test_model_takes_precedence_over_the_folder_of_the_tokenizer(make_folder, tmp_path):
    folder, again = make_folder("gemma3_text"), tmp_path / "again"
    model, variables = import_model(folder)
    content = json.loads((folder / "config.json").read_text())
    assert content["rope_local_base_freq"] != 7.0
    (folder / "config.json").write_text(json.dumps({**content, "rope_local_base_freq": 7.0}))
    export_model(again, model, variables, tokenizer_folder=folder)
    assert import_model(again)[0] == model


def test_interrupted_export_leaves_no_model(make_folder, tmp_path, monkeypatch):
    folder, again = make_folder("llama"), tmp_path / "again"
    model, variables = import_model(folder)
    export_model(again, model, variables)

    def fail(*args, **kwargs):
        raise OSError("full")

    monkeypatch.setattr(exporting, "_write_tensors", fail)
    with pytest.raises(OSError, match="full"):
        export_model(again, model, variables)
    with pytest.raises(FileNotFoundError):
        import_model(again)


def test_tokenizer_files_and_token_ids_are_copied(make_folder, tmp_path):
    folder, again = make_folder("llama"), tmp_path / "again"
    (folder / "tokenizer.json").write_text("{}")
    (folder / "generation_config.json").write_text('{"temperature": 0.5}')
    (folder / "notes.txt").write_text("not of a tokenizer")
    model, variables = import_model(folder)
    export_model(again, model, variables, tokenizer_folder=folder)
    assert (again / "tokenizer.json").read_text() == "{}"
    assert (again / "generation_config.json").read_text() == '{"temperature": 0.5}'
    # Defaults in config.json are moved, as transformers does.
    for path in (folder / "generation_config.json", again / "generation_config.json"):
        path.unlink()
    config_json = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config_json | {"top_p": 0.5, "top_k": 3}))
    export_model(again, model, variables, tokenizer_folder=folder)
    moved = json.loads((again / "generation_config.json").read_text())
    assert (moved["top_p"], moved["top_k"]) == (0.5, 3) and "vocab_size" not in moved
    assert not (again / "notes.txt").exists()
    content = json.loads((again / "config.json").read_text())
    assert (content["eos_token_id"], content["max_position_embeddings"]) == (2, 32)


def test_bare_encoder_network_is_exported_as_bert(make_folder, tmp_path):
    model, variables = import_model(make_folder("bert"))
    export_model(tmp_path, model.lm_tpl, {"params": variables["params"]["lm"]})
    jax.tree.map(np.testing.assert_array_equal, import_model(tmp_path)[1], variables)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "bert"
