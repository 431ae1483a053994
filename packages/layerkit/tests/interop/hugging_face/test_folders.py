"""Folders in forms beside the usual one: without an index, in 8 bits, or of other libraries."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from layerkit.config import build
from layerkit.errors import ConfigError
from layerkit.interop.hugging_face import (
    TensorFileError,
    UnsupportedModelError,
    import_model,
    model_config,
)

SHARD = "model-{}-of-00002.safetensors"


@pytest.fixture
def split(make_folder, read_tensors):
    """Return a function that writes a Llama in two files without an index."""
    numpy = pytest.importorskip("safetensors.numpy")

    def make(*, repeated=()):
        folder = make_folder("llama")
        tensors = read_tensors(folder)
        (folder / "model.safetensors").unlink()
        first = sorted(tensors)[:10]
        numpy.save_file({name: tensors[name] for name in first}, folder / SHARD.format("00001"))
        rest = {name: t for name, t in tensors.items() if name not in first or name in repeated}
        numpy.save_file(rest, folder / SHARD.format("00002"))
        return folder

    return make


def test_shards_without_an_index_are_read(make_folder, split):
    whole = import_model(make_folder("llama"))[1]
    jax.tree.map(np.testing.assert_array_equal, import_model(split())[1], whole)


def test_shards_without_an_index_must_be_complete_and_distinct(raises, split):
    with raises(TensorFileError, value=["lm_head.weight"]):
        import_model(split(repeated=["lm_head.weight"]))
    folder = split()
    (folder / SHARD.format("00001")).unlink()
    with raises(FileNotFoundError):
        import_model(folder)


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2])
def test_tensors_in_8_bits_are_read_exactly(make_folder, read_tensors, dtype):
    rounded = make_folder(
        "llama", change=lambda tensors: round_matrices(tensors, dtype, np.float32)
    )
    expected = import_model(rounded)
    folder = make_folder("llama", change=lambda tensors: round_matrices(tensors, dtype, dtype))
    config, variables = import_model(folder)
    layer = variables["params"]["lm"]["stack"]["repeat"]["sub"]
    assert layer["attention"]["query"]["w"].dtype == jnp.bfloat16
    jax.tree.map(np.testing.assert_array_equal, variables, expected[1])
    ids = jnp.array([[1, 2, 3]])
    run = jax.jit(lambda v: build(config).apply(v, ids, method=lambda m, x: m.lm.logits(x)))
    np.testing.assert_allclose(run(variables), run(expected[1]), rtol=1e-6)


def round_matrices(tensors, dtype, stored):
    """Round all matrices to a dtype and store them in another one."""
    for name, tensor in tensors.items():
        if tensor.ndim == 2:
            tensors[name] = tensor.astype(dtype).astype(stored)


@pytest.mark.parametrize(
    "content",
    [
        {"model_type": "mistral3", "text_config": {"model_type": "mistral"}},
        {"model_type": "llamma"},
        {"model_type": ["llama"]},
        {"hidden_size": 8},
    ],
    ids=["part", "near", "list", "none"],
)
def test_model_of_another_family_raises(raises, tmp_path, content):
    (tmp_path / "config.json").write_text(json.dumps(content))
    with raises(UnsupportedModelError, field="model_type", value=content.get("model_type")):
        model_config(tmp_path)


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("llama", "rope_theta", "high"),
        ("llama", "rope_parameters", "default"),
        ("llama", "hidden_size", "8"),
        ("llama", "hidden_act", ["silu"]),
        ("llama", "num_key_value_heads", -2),
        ("qwen2", "layer_types", 3),
        ("gemma2", "sliding_window", "4"),
        ("phi3", "partial_rotary_factor", "half"),
        ("t5", "feed_forward_proj", 1),
    ],
)
def test_value_of_a_wrong_type_is_named(raises, make_folder, family, key, value):
    folder = make_folder(family, edit={key: value})
    with raises(ConfigError, field=key, value=value):
        model_config(folder)
