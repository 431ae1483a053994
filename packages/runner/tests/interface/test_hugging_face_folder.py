"""A Hugging Face folder as a loaded model: the logits and tokens of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

import layerkit_runner
from layerkit.config import build
from layerkit.errors import UserError
from layerkit.interop import hugging_face
from layerkit.layers import quantize_model
from layerkit_runner.tools.quantize import quantize_folder

IDS = [[1, 5, 9, 2, 7], [1, 3, 3, 8, 6]]


@pytest.fixture(scope="module")
def theirs() -> Any:
    """A Llama of transformers with random weights."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=16,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=64,
            bos_token_id=1,
            eos_token_id=2,
        )
    ).eval()


def test_logits_and_greedy_tokens_equal_those_of_transformers(
    theirs: Any, tmp_path: Path, raises: Any
):
    import torch

    theirs.save_pretrained(tmp_path / "llama")
    model = layerkit_runner.load(tmp_path / "llama", overrides={"DTYPE": "float32"})
    with torch.no_grad():
        expected = theirs(torch.tensor(IDS)).logits.numpy()
        tokens = theirs.generate(torch.tensor(IDS[:1]), max_new_tokens=8, do_sample=False)
    np.testing.assert_allclose(model.logits(IDS), expected, atol=1e-4)
    (result,) = model.generate_ids(IDS[:1], max_new_tokens=np.int64(8), temperature=np.float32(0))
    assert result.tolist() == tokens[0, len(IDS[0]) :].tolist()
    with raises(UserError, value="FOLDER"):
        layerkit_runner.load(tmp_path / "llama", overrides={"FOLDER": "x"})


def test_rows_outgrow_the_trained_length_of_longrope_as_in_transformers(tmp_path: Path):
    torch, transformers = map(pytest.importorskip, ("torch", "transformers"))
    torch.manual_seed(0)
    factors = {"rope_type": "longrope", "short_factor": [1.0, 2.0], "long_factor": [4.0, 8.0]}
    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0}
    config = transformers.Phi3Config(
        **sizes, eos_token_id=None, rope_scaling=factors, original_max_position_embeddings=8
    )
    phi3 = transformers.Phi3ForCausalLM(config).eval()
    with torch.no_grad():
        for weight in phi3.parameters():
            weight.add_(0.3 * torch.randn_like(weight))
    phi3.save_pretrained(tmp_path)
    model = layerkit_runner.load(tmp_path, overrides={"DTYPE": "float32"})
    tokens = phi3.generate(torch.tensor(IDS[:1]), max_new_tokens=9, do_sample=False)
    (result,) = model.generate_ids(IDS[:1], max_new_tokens=9)
    streamed: list[int] = []
    model.generate_ids(IDS[:1], max_new_tokens=9, stream=lambda row, token: streamed.append(token))
    assert result.tolist() == streamed == tokens[0, len(IDS[0]) :].tolist()


@pytest.mark.slow  # layerkit tests the decoder
def test_drafts_change_neither_tokens_nor_their_stream(tmp_path: Path):
    content = {"model_type": "glm4_moe", "vocab_size": 16, "hidden_size": 8, "head_dim": 4}
    content |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    content |= {"intermediate_size": 8, "moe_intermediate_size": 8, "n_routed_experts": 4}
    content |= {"num_experts_per_tok": 2, "num_nextn_predict_layers": 1}
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.json").write_text(json.dumps(content))
    config = hugging_face.model_config(tmp_path / "config")
    variables = jax.jit(build(config).init)(jax.random.key(0))
    hugging_face.export_model(tmp_path / "model", config, jax.tree.map(lambda x: 2 * x, variables))
    results = []
    for decoder in ("SampleDecoder", "SpeculativeDecoder"):
        overrides = {"task.model.decoder": f"layerkit.decoding.{decoder}"}
        model = layerkit_runner.load(tmp_path / "model", overrides=overrides)
        streamed: list[tuple[int, int]] = []
        options = {"max_new_tokens": 9, "temperature": 0.0}
        result = model.generate_ids(
            [IDS[0], IDS[1][:2]],
            **options,
            stream=lambda *pair, to=streamed: to.append(pair),
        )
        results.append((streamed, [ids.tolist() for ids in result]))
    assert results[0] == results[1]
    assert len(results[0][0]) > 8


@pytest.mark.parametrize(
    ("content", "explicit"),
    [
        ({"max_length": 14, "repetition_penalty": 1.5, "temperature": 0.3}, {}),
        ({"max_new_tokens": 9, "no_repeat_ngram_size": 2, "min_new_tokens": 9}, {}),
        ({"suppress_tokens": [4, 7], "do_sample": True}, {"max_new_tokens": 7, "temperature": 0}),
    ],
)
def test_defaults_of_generation_are_those_of_transformers(
    theirs: Any,
    content: dict[str, Any],
    explicit: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    raises: Any,
    monkeypatch: pytest.MonkeyPatch,
):
    import torch
    import transformers

    # Other tests generate with the same model.
    config = transformers.GenerationConfig(eos_token_id=2)
    monkeypatch.setattr(theirs, "generation_config", config)
    theirs.save_pretrained(tmp_path)
    theirs.generation_config.update(**content)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, **content}))
    options = {"do_sample": False} | explicit if explicit else {}
    options.pop("temperature", None)
    expected = theirs.generate(torch.tensor(IDS[:1]), **options)[0, len(IDS[0]) :].tolist()
    model = layerkit_runner.load(tmp_path, overrides={"DTYPE": "float32"})
    assert "(generation_config.json)" in capsys.readouterr().err
    (result, _) = model.generate_ids([IDS[0], IDS[1] * 2], **explicit)
    assert result.tolist() == expected
    if "max_length" in content:
        assert len(model.generate_ids([IDS[1]])[0]) <= 9
        assert len(model.generate_ids([IDS[0]], max_new_tokens=20)[0]) > 9
        with raises(UserError, field="length of prompts[0]", value=15):
            model.generate_ids([IDS[0] * 3])


def write_tokenizer(folder: Path, template: str, declared: dict[str, Any]) -> None:
    """Write a tokenizer of the letters a to l, with `<s>` and `</s>`, and its post-processor."""
    tokenizers = pytest.importorskip("tokenizers")
    names = ["<unk>", "<s>", "</s>", "<|end|>", *"abcdefghijkl"]
    vocabulary = {name: number for number, name in enumerate(names)}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, "<unk>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    model.add_special_tokens(names[:4])
    model.post_processor = tokenizers.processors.TemplateProcessing(template, None, [("<s>", 1)])
    model.save(str(folder / "tokenizer.json"))
    declared = {"bos_token": "<s>", "eos_token": "</s>", **declared}
    (folder / "tokenizer_config.json").write_text(json.dumps(declared))


@pytest.mark.parametrize("template", ["<s> $A", "$A"])
def test_texts_begin_as_those_of_auto_tokenizer(theirs: Any, template: str, tmp_path: Path):
    import torch
    import transformers

    theirs.save_pretrained(tmp_path)
    write_tokenizer(tmp_path, template, {"tokenizer_class": "PreTrainedTokenizerFast"})
    auto = transformers.AutoTokenizer.from_pretrained(tmp_path)
    model = layerkit_runner.load(tmp_path, overrides={"DTYPE": "float32"})
    texts = ["a b c d", "<s> a b", "c"]
    for text, score in zip(texts, model.score(texts), strict=True):
        # A post-processor would add the start token to a text that begins with it.
        ids = auto(text.removeprefix("<s> ")).input_ids
        if text.startswith("<s>") and template == "$A":
            ids = [1, *ids]
        with torch.no_grad():
            logits = theirs(torch.tensor([ids])).logits[0, :-1]
        expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        assert score.ids.tolist() == ids[1:]
        np.testing.assert_allclose(score.token_log_probs, expected.numpy(), atol=1e-5)
        tokens = theirs.generate(torch.tensor([ids]), max_new_tokens=6, do_sample=False)[0]
        new = auto.decode(tokens[len(ids) :], skip_special_tokens=True)
        (result,) = model.generate(text, max_new_tokens=6, temperature=0)
        assert result.split() == new.split()
    (whole,) = model.score("a b c d")
    (part,) = model.score("c d", prompts="a b")
    np.testing.assert_allclose(part.token_log_probs, whole.token_log_probs[-2:], atol=1e-5)
    assert model.generate("", max_new_tokens=4, temperature=0) == model.generate(
        "<s>", max_new_tokens=4, temperature=0
    )


def test_each_declared_end_token_ends_a_text_and_a_disagreement_is_reported(
    theirs: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    theirs.save_pretrained(tmp_path)
    write_tokenizer(tmp_path, "$A", {})
    model = layerkit_runner.load(tmp_path, overrides={"DTYPE": "float32"})
    (unbounded,) = model.generate_ids([[1, 4]], max_new_tokens=6, temperature=0)
    assert "end tokens" not in capsys.readouterr().err
    # Each file ends the text at another of its tokens; the first of them counts.
    for name, at in (("generation_config.json", 4), ("config.json", 2)):
        path = tmp_path / name
        # The last id is beyond the vocabulary, as the defaults of small models are.
        content = json.loads(path.read_text()) | {"eos_token_id": [int(unbounded[at]), 2, 50256]}
        path.write_text(json.dumps(content))
        model = layerkit_runner.load(tmp_path, overrides={"DTYPE": "float32"})
        (result,) = model.generate_ids([[1, 4]], max_new_tokens=6, temperature=0)
        first = unbounded.tolist().index(unbounded[at])
        assert result.tolist() == unbounded[: first + 1].tolist()
        err = capsys.readouterr().err
        assert err.count("end tokens") == 1 and "training ends a text with </s> (2)" in err


def test_folder_without_a_tokenizer_scores_ids_and_names_what_is_missing(
    raises: Any, tmp_path: Path
):
    pytest.importorskip("safetensors")
    from layerkit.interop.hugging_face import import_model

    write_llama(tmp_path)
    model = layerkit_runner.load(tmp_path)
    config, variables = import_model(tmp_path)
    module = config.Instantiate()
    logits = jax.jit(lambda v, ids: module.apply(v, ids, method=lambda m, ids: m.lm.logits(ids)))
    expected = logits(variables, np.array(IDS))
    np.testing.assert_allclose(model.logits(IDS), expected, atol=1e-4)
    with raises(UserError, problem="no tokenizer"):
        model.generate("x")
    with raises(UserError, field="step", value=3):
        layerkit_runner.load(tmp_path, step=3)


def test_folder_may_be_relative_to_the_home_or_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("safetensors")
    write_llama(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    monkeypatch.chdir(tmp_path.parent)
    for given in (f"~/{tmp_path.name}", tmp_path.name):
        experiment = layerkit_runner.load(given).job.resolved.experiment
        assert Path(experiment.FOLDER) == tmp_path


@pytest.mark.slow  # test_quantized_folder.py has a job folder
def test_quantized_folder_is_near_its_source(tmp_path: Path):
    pytest.importorskip("safetensors")
    (tmp_path / "llama").mkdir()
    write_llama(tmp_path / "llama")
    quantize_folder(str(tmp_path / "llama"), str(tmp_path / "int8"), weight_format="int8")
    # The folder was written under another name.
    assert ".partial" not in (tmp_path / "int8" / "config.json").read_text()
    before, after = (layerkit_runner.load(tmp_path / name) for name in ("llama", "int8"))
    expected = before.logits(IDS)
    # Weights with a standard deviation of 1 amplify errors.
    error = np.abs(after.logits(IDS) - expected).max()
    assert 0 < error < 0.15 * np.abs(expected).max()
    (up,) = [leaf for path, leaf in flatten_dict(after.weights).items() if path[-2:] == ("up", "w")]
    assert up.dtype == np.int8


def test_model_rounds_the_weights_that_it_reads(tmp_path: Path):
    pytest.importorskip("safetensors")
    write_llama(tmp_path)
    model = layerkit_runner.load(tmp_path, overrides={"task.model.weight_format": "nf4:4"})
    before = layerkit_runner.load(tmp_path)
    config, variables = quantize_model(before.config, before.variables, weight_format="nf4:4")
    expected, result = (flatten_dict(each, sep="/") for each in (variables, model.variables))
    assert config == model.config
    assert result.keys() == expected.keys()
    for name, leaf in expected.items():
        np.testing.assert_array_equal(result[name], leaf)


def write_llama(folder: Path) -> None:
    """Write random weights in the layout of Llama."""
    from safetensors.numpy import save_file

    content = {
        "model_type": "llama",
        "vocab_size": 16,
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(content))
    layer, drawn = "model.layers.0", np.random.default_rng(0)
    shapes = {
        "model.embed_tokens.weight": (16, 8),
        "lm_head.weight": (16, 8),
        "model.norm.weight": (8,),
        f"{layer}.input_layernorm.weight": (8,),
        f"{layer}.post_attention_layernorm.weight": (8,),
        **{f"{layer}.self_attn.{name}_proj.weight": (8, 8) for name in "qkvo"},
        f"{layer}.mlp.gate_proj.weight": (12, 8),
        f"{layer}.mlp.up_proj.weight": (12, 8),
        f"{layer}.mlp.down_proj.weight": (8, 12),
    }
    tensors = {name: drawn.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
