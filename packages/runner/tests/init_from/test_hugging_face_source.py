"""A run that begins with the weights of a Hugging Face folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from layerkit.config import build
from layerkit.interop.hugging_face import export_model, model_config
from layerkit.layers.quantization.lora import add_lora
from layerkit.layers.transformer.pipelined_transformer import PipelinedTransformer
from layerkit_runner.errors import UsageError
from layerkit_runner.init_from import plan_first_state


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, begin: Any) -> tuple[Path, dict[str, Any]]:
    """(a GPT-2 in bfloat16, its weights by path)."""
    content = {
        "model_type": "gpt2",
        "vocab_size": 32,
        "n_embd": 8,
        "n_layer": 2,
        "n_head": 2,
        "n_positions": 16,
    }
    described = tmp_path_factory.mktemp("described")
    (described / "config.json").write_text(json.dumps(content))
    config = model_config(described, dtype="bfloat16")
    variables = jax.jit(lambda: build(config).init(jax.random.key(5)))()
    written = tmp_path_factory.mktemp("written")
    export_model(written, config, variables)
    return written, begin.leaves({"params": variables["params"]})


@pytest.mark.parametrize(
    "repeated", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["repeated", "unrolled"]
)
def test_weights_of_a_hugging_face_folder(
    folder: tuple[Path, dict[str, Any]], begin: Any, repeated: bool
):
    path, values = folder
    model = model_config(path, repeated=repeated)
    partitioner, task = begin.bound(model, [2, 2, 2], begin=begin.init_from(path))
    first = plan_first_state(partitioner, task)()
    result = begin.leaves({"params": first.state.params})
    for name, value in values.items():
        names = [name] if repeated else [name.replace("repeat/sub", f"layers_{i}") for i in (0, 1)]
        stacked = not repeated and names[0] != name
        for layer, one in enumerate(names if stacked else [name]):
            expected = np.asarray(value[layer] if stacked else value, np.float32)
            np.testing.assert_array_equal(result[one], expected, err_msg=one)
    shardings = partitioner.state_shardings(task)
    assert jax.tree.map(lambda leaf: leaf.sharding, first.state) == shardings
    assert first.provenance.weights["lm/softmax/w"] == f"{path}:params/lm/softmax/w"
    (count,) = [line for line in first.provenance.lines() if "bfloat16 → float32" in line]
    assert f"{len(result)} values converted" in count


@pytest.mark.slow
def test_weights_of_a_pipelined_model(folder: tuple[Path, dict[str, Any]], begin: Any):
    path, values = folder
    model = model_config(path)
    layer = model.lm_tpl.stack_tpl.layer_tpl
    stack = PipelinedTransformer.HParams.config(
        num_stages=2, num_microbatches=2, layer_tpl=add_lora(layer, rank=2)
    )
    model.lm_tpl.stack_tpl = stack
    first = plan_first_state(*begin.bound(model, begin=begin.init_from(path)))()
    result = begin.leaves({"params": first.state.params})
    name = "attention/query/w"
    (pipelined,) = (value for path, value in result.items() if path.endswith(name))
    expected = values[f"params/lm/stack/repeat/sub/{name}"]
    np.testing.assert_array_equal(np.reshape(pipelined, expected.shape), expected)
    drawn = {path for path, of in first.provenance.weights.items() if of == "random_init"}
    assert drawn == {path.removeprefix("params/") for path in result if "lora" in path}
    assert drawn


ENCODER = {"vocab_size": 32, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 3}
ENCODER |= {"num_attention_heads": 2, "max_position_embeddings": 16}
BART = {"vocab_size": 32, "d_model": 8, "encoder_layers": 2, "decoder_layers": 2}
BART |= {"encoder_ffn_dim": 12, "decoder_ffn_dim": 10, "max_position_embeddings": 16}
BART |= {"encoder_attention_heads": 2, "decoder_attention_heads": 4}


@pytest.mark.slow  # a decoder is above
@pytest.mark.parametrize(
    "content",
    [
        {**ENCODER, "model_type": "bert"},
        {**ENCODER, "model_type": "modernbert", "architectures": ["ModernBertModel"]},
        {**BART, "model_type": "bart"},
    ],
    ids=lambda content: content["model_type"],
)
def test_weights_of_encoders_and_encoder_decoders(
    content: dict[str, Any], tmp_path: Path, begin: Any
):
    (tmp_path / "config.json").write_text(json.dumps(content))
    config = model_config(tmp_path, dtype="float32")
    variables = jax.jit(lambda: build(config).init(jax.random.key(5)))()
    export_model(tmp_path / "written", config, variables)
    first = plan_first_state(*begin.bound(config, begin=begin.init_from(tmp_path / "written")))()
    result = begin.leaves({"params": first.state.params})
    for name, value in begin.leaves({"params": variables["params"]}).items():
        np.testing.assert_array_equal(result[name], value, err_msg=name)


def test_unsupported_model_type_is_an_error(raises, tmp_path: Path, begin: Any):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt3"}))
    (tmp_path / "model.safetensors").touch()
    partitioner, task = begin.bound(begin.model(), begin=begin.init_from(tmp_path))
    with raises(UsageError, field="model_type", value="gpt3") as caught:
        plan_first_state(partitioner, task)
    assert caught.value.owner.startswith("task.initial_weights")
