"""Adapters in folders of PEFT: logits of both libraries, both ways, and untrusted folders."""

from __future__ import annotations

import json
import os
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

from layerkit.config import build
from layerkit.errors import ConfigError
from layerkit.interop.hugging_face import TensorMismatchError, import_model
from layerkit.interop.peft import export_adapters, import_adapters
from layerkit.interop.peft.adapter_folder import AdapterFolder
from layerkit.layers.quantization.lora import add_lora, remove_lora
from layerkit.layers.quantization.stored_weights import quantize_model

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
safetensors = pytest.importorskip("safetensors")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
pytest.importorskip("safetensors.numpy")

# Warnings of PEFT and Transformers about each other, and about what the cases are made to have.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

SIZES = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
NEOX = {key: value for key, value in SIZES.items() if key != "num_key_value_heads"}
NEOX |= {"hidden_size": 32}
GPT2 = {"vocab_size": 64, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 64}
IDS = np.random.default_rng(1).integers(1, 64, (2, 9))
ATTENTION = ["q_proj", "v_proj"]
PATTERNS = {
    "rank_pattern": {"v_proj": 2, "model.layers.1.mlp.up_proj": 3, ".*0.self_attn.q_proj": 5},
    "alpha_pattern": {"o_proj": 3.5, "down_proj": 1},
}
# (family, options of its config, options of LoRA)
CASES = {
    "lora": ("Llama", SIZES, {"target_modules": ATTENTION}),
    "patterns": ("Llama", SIZES, {"target_modules": "all-linear", **PATTERNS}),
    "rslora": ("Mistral", SIZES, {"target_modules": "all-linear", "use_rslora": True, "r": 3}),
    "dora": ("Qwen2", SIZES, {"target_modules": "all-linear", "use_dora": True}),
    "one layer": ("Llama", SIZES, {"target_modules": ATTENTION, "layers_to_transform": [1]}),
    "saved": (
        "Qwen3",
        SIZES,
        {"target_modules": ATTENTION, "modules_to_save": ["lm_head", "model.norm"]},
    ),
    "tied": (
        "Llama",
        {**SIZES, "tie_word_embeddings": True},
        {"target_modules": ATTENTION, "modules_to_save": ["embed_tokens", "lm_head"]},
    ),
    "joined": ("Phi3", SIZES, {"target_modules": "all-linear"}),
    "joined, dora": ("Phi3", SIZES, {"target_modules": ["qkv_proj"], "use_dora": True}),
    "conv1d": ("GPT2", GPT2, {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    "fused heads": (
        "GPTNeoX",
        NEOX,
        {"target_modules": ["query_key_value", "dense"]},
    ),
    "mixture": ("Mixtral", {**SIZES, "num_local_experts": 3}, {"target_modules": ATTENTION}),
}
SLOW = {"rslora", "one layer", "joined, dora", "fused heads", "mixture"}


def drawn(model: Any) -> None:
    """Draw the weights of adapters and saved modules, in place."""
    for name, value in model.named_parameters():
        # Saved modules that are tied get the same values.
        seed = value.shape if "modules_to_save" in name else name.encode()
        random = np.random.default_rng([*seed])
        if "lora_magnitude" in name:
            value.data *= torch.tensor(random.uniform(0.7, 1.3, value.shape), dtype=value.dtype)
        elif value.requires_grad:
            value.data += torch.tensor(random.normal(0, 0.2, value.shape), dtype=value.dtype)


def torch_logits(model: Any) -> np.ndarray:
    with torch.no_grad():
        return model.eval()(input_ids=torch.tensor(IDS)).logits.numpy()


def our_logits(config: Any, variables: Any) -> np.ndarray:
    model = build(config)
    run = jax.jit(lambda v: model.apply(v, jnp.asarray(IDS), method=lambda m, i: m.lm.logits(i)))
    return np.asarray(run(variables))


def made(folder: Any, family: str, sizes: dict[str, Any], **options: Any) -> np.ndarray:
    """Write a model and an adapter of PEFT; return the logits of both together."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**sizes)
    base = getattr(transformers, f"{family}{'LMHeadModel' if family == 'GPT2' else 'ForCausalLM'}")
    model = base(config)
    for value in model.parameters():
        value.data *= 2  # Transformers draws small weights
    model.save_pretrained(folder / "base")
    options = {"r": 4, "lora_alpha": 6, "lora_dropout": 0.1, "task_type": "CAUSAL_LM"} | options
    adapted = peft.get_peft_model(model, peft.LoraConfig(**options))
    drawn(adapted)
    adapted.save_pretrained(folder / "adapter")
    return torch_logits(adapted)


def loaded(folder: Any, adapter: Any) -> np.ndarray:
    """Return the logits of PEFT with an adapter."""
    base = transformers.AutoModelForCausalLM.from_pretrained(folder / "base", dtype="float32")
    return torch_logits(peft.PeftModel.from_pretrained(base, adapter))


def assert_near(result: np.ndarray, expected: np.ndarray) -> None:
    error = np.abs(result - expected).max() / np.abs(expected).max()
    print(f"error {error:.1e}")
    assert error < 1e-5


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in CASES]
)
def test_adapters_of_peft_give_its_logits_and_return_unchanged(name, tmp_path):
    family, sizes, options = CASES[name]
    expected = made(tmp_path, family, sizes, **options)
    plain = import_model(tmp_path / "base")
    assert np.abs(our_logits(*plain) - expected).max() > 0.1 * np.abs(expected).max()
    adapted = import_adapters({str(tmp_path / "adapter"): 1.0}, *plain)
    assert_near(our_logits(*adapted), expected)
    assert_near(our_logits(*remove_lora(*adapted)), expected)

    saved = {"saved": ("lm/softmax/w", "lm/final_norm/scale"), "tied": ("lm/softmax/w",)}
    base = tmp_path / "base"
    export_adapters(
        tmp_path / "out", *adapted, base_folder=base, modules_to_save=saved.get(name, ())
    )
    assert_near(loaded(tmp_path, tmp_path / "out"), expected)
    again = import_adapters({str(tmp_path / "out"): 1.0}, *plain)
    assert_near(our_logits(*again), expected)
    theirs = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    content = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    for key in ("use_rslora", "use_dora", "fan_in_fan_out", "peft_type", "lora_dropout"):
        assert content[key] == theirs[key], key
    if name not in ("patterns", "one layer", "rslora", "dora", "joined"):
        assert (content["r"], content["lora_alpha"]) == (theirs["r"], theirs["lora_alpha"])
        names = {module.rpartition(".")[2] for module in content["target_modules"]}
        assert names == set(theirs["target_modules"])


def test_dora_of_one_of_several_unrolled_layers(tmp_path):
    options = {"target_modules": ATTENTION, "layers_to_transform": [1], "use_dora": True}
    expected = made(tmp_path, "Llama", SIZES, **options)
    plain = import_model(tmp_path / "base", repeated=False)
    assert_near(our_logits(*import_adapters({str(tmp_path / "adapter"): 1.0}, *plain)), expected)


def test_several_adapters_are_the_weighted_sum_of_peft(tmp_path):
    made(tmp_path, "Llama", SIZES, target_modules=ATTENTION)
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype="float32")
    model = peft.PeftModel.from_pretrained(base, tmp_path / "adapter", "one")
    other = peft.LoraConfig(r=3, lora_alpha=9, use_rslora=True, target_modules=["q_proj", "o_proj"])
    model.add_adapter("two", other)
    model.set_adapter("two")
    drawn(model)
    model.save_pretrained(tmp_path, selected_adapters=["two"])
    for module in (module for module in model.modules() if hasattr(module, "lora_A")):
        for name in module.scaling:
            module.scaling[name] *= {"one": 0.75, "two": -0.5}[name]
    model.base_model.set_adapter(["one", "two"])
    folders = {str(tmp_path / "adapter"): 0.75, str(tmp_path / "two"): -0.5}
    adapted = import_adapters(folders, *import_model(tmp_path / "base"))
    assert_near(our_logits(*adapted), torch_logits(model))


@pytest.mark.parametrize("options", [{}, {"rank_stabilized": True}, {"has_magnitude": True}])
def test_adapters_of_each_part_of_a_joined_tensor_are_exported(tmp_path, options):
    made(tmp_path, "Phi3", SIZES, target_modules=["qkv_proj"])
    config, variables = import_model(tmp_path / "base")
    config = add_lora(config, rank=2, only=".*(query|key|value|linear)_tpl", **options)
    like = flatten_dict(jax.eval_shape(build(config).init, jax.random.key(0)))
    random, flat = np.random.default_rng(0), flatten_dict(variables)
    draws = {p: random.normal(0, 0.3, x.shape).astype("f4") for p, x in like.items()}
    both = unflatten_dict({path: flat.get(path, draws[path]) for path in like})
    export_adapters(tmp_path / "out", config, both, base_folder=tmp_path / "base")
    assert_near(loaded(tmp_path, tmp_path / "out"), our_logits(config, both))
    content = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    layers = [f"model.layers.{layer}." for layer in (0, 1)]
    ranks = {
        f"{layer}mlp.{name}_proj": r
        for layer in layers
        for name, r in (("gate_up", 4), ("down", 2))
    }
    assert (content["r"], content["rank_pattern"]) == (6, ranks)


def test_adapters_beside_integers_are_those_of_the_floats(tmp_path):
    made(tmp_path, "Llama", SIZES, target_modules=ATTENTION, use_dora=False)
    folders = {str(tmp_path / "adapter"): 1.0}
    config, variables = import_adapters(folders, *import_model(tmp_path / "base"))
    stored, integers = quantize_model(config, variables, weight_format="nf4:8")
    export_adapters(tmp_path / "out", stored, integers, base_folder=tmp_path / "base")
    one, other = (
        safetensors.numpy.load_file(tmp_path / name / "adapter_model.safetensors")
        for name in ("adapter", "out")
    )
    jax.tree.map(np.testing.assert_array_equal, one, other)


def changed(folder, **keys):
    """Change adapter_config.json of a folder."""
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("peft_type", "LOHA"),
        ("bias", "all"),
        ("init_lora_weights", "pissa"),
        ("r", 0),
        ("lora_alpha", "much"),
        ("rank_pattern", {"(a*)*b": 2}),
        ("rank_pattern", 3),
        ("rank_pattern", {"q_proj\\": 2}),
        ("alpha_pattern", {"q_proj": -1}),
        ("alpha_pattern", {"q_proj": 1e300}),
        ("lora_dropout", 1.5),
        ("lora_dropout", "x"),
        (None, {"use_qalora": True}),
        (None, {"layer_replication": [[0, 2]], "new_option": 3}),
    ],
)
def test_an_unsupported_option_is_an_error_that_names_it(raises, tmp_path, adapter, key, value):
    shutil.copytree(adapter / "adapter", tmp_path / "adapter")
    changed(tmp_path / "adapter", **(value if key is None else {key: value}))
    owner = str(tmp_path / "adapter/adapter_config.json")
    with raises(ConfigError, owner=owner, field=key, value=value):
        AdapterFolder(tmp_path / "adapter")


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    """A folder with a model and an adapter."""
    folder = tmp_path_factory.mktemp("adapter")
    made(folder, "Llama", SIZES, target_modules=ATTENTION)
    return folder


def test_a_folder_that_does_not_fit_is_an_error(raises, tmp_path, adapter):
    plain, weights = (
        import_model(adapter / "base"),
        adapter / "adapter" / "adapter_model.safetensors",
    )
    tensors = safetensors.numpy.load_file(weights)
    a, b = (f"base_model.model.model.layers.0.self_attn.q_proj.lora_{x}.weight" for x in "AB")
    shutil.copytree(adapter / "adapter", tmp_path / "it")
    folders = {str(tmp_path / "it"): 1.0}
    for change, field in (
        ({a: tensors[a][:2]}, f"shape of {a}"),
        ({a: tensors[a][:, :3]}, f"shape of {a}"),
        ({b: np.full_like(tensors[b], np.nan)}, f"tensor {b}"),
        ({a.replace(".0.", ".7."): tensors[a], b.replace(".0.", ".7."): tensors[b]}, None),
        ({"base_model.model.model.embed_tokens.lora_embedding_A": tensors[a]}, None),
    ):
        safetensors.numpy.save_file(tensors | change, tmp_path / "it" / weights.name)
        with raises(TensorMismatchError, field=field):
            import_adapters(folders, *plain)
    safetensors.numpy.save_file(tensors, tmp_path / "it" / weights.name)
    with raises(ConfigError, field="HeadProjection.dot_tpl", value="LoraDot"):
        import_adapters(folders, *import_adapters(folders, *plain))
    with raises(ConfigError, field="config"):
        export_adapters(tmp_path / "out", *plain)
    adapted, variables = import_adapters(folders, *plain)
    zeros = jax.tree.map_with_path(
        lambda path, x: x * ("lora" not in jax.tree_util.keystr(path)), variables
    )
    with raises(ConfigError, owner="LoraDot", value=0):
        export_adapters(tmp_path / "out", adapted, zeros)
    assert not (tmp_path / "out").exists()
    with pytest.raises(FileExistsError, match="has a model"):
        export_adapters(adapter / "base", *import_adapters(folders, *plain))
    (tmp_path / "it" / weights.name).rename(tmp_path / "it" / "adapter_model.bin")
    with pytest.raises(FileNotFoundError, match="pickle, which could run code"):
        import_adapters(folders, *plain)
