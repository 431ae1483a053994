"""Tests of folders that are damaged, or that try to read other files or to exhaust the host."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

from layerkit.config import Config
from layerkit.errors import ConfigError
from layerkit.interop.hugging_face import (
    TensorFileError,
    TensorMismatchError,
    UnsupportedModelError,
    import_model,
    model_config,
)
from layerkit.interop.hugging_face.keys import all_layers
from layerkit.interop.hugging_face.layer_types import stack_layers
from layerkit.layers.transformer.transformer import Transformer
from layerkit.models.transformer_lm import TransformerLm

INDEX = "model.safetensors.index.json"


@pytest.fixture
def make_shards(make_folder, read_tensors):
    """Return a function that writes a Llama in two shards; see its argument `edit`."""
    numpy = pytest.importorskip("safetensors.numpy")

    def make(edit=None):
        folder = make_folder("llama")
        tensors = read_tensors(folder)
        (folder / "model.safetensors").unlink()
        names = sorted(tensors)
        shards: dict[str, Any] = {
            "a.safetensors": {name: tensors[name] for name in names[:10]},
            "b.safetensors": {name: tensors[name] for name in names[10:]},
        }
        weight_map = {name: shard for shard, held in shards.items() for name in held}
        if edit is not None:
            edit(shards, weight_map)
        for shard, held in shards.items():
            numpy.save_file(held, folder / shard)
        (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
        return folder

    return make


def test_tensor_is_read_from_the_shard_in_the_index(make_shards):
    name = "model.norm.weight"

    def add_stale_copies(shards, weight_map):
        for held in shards.values():
            held[name] = held.get(name, np.zeros(8, np.float32))
        shards["a.safetensors"][name] = np.full(8, 2.0, np.float32)
        weight_map[name] = "a.safetensors"

    variables = import_model(make_shards(add_stale_copies))[1]
    np.testing.assert_array_equal(variables["params"]["lm"]["final_norm"]["scale"], 2.0)


def test_tensor_in_another_shard_than_in_the_index_raises(raises, make_shards):
    def swap(shards, weight_map):
        weight_map["model.norm.weight"] = "a.safetensors"

    folder = make_shards(swap)
    with raises(TensorFileError, owner=str(folder / "a.safetensors")):
        import_model(folder)


@pytest.mark.parametrize("kind", ["parent", "absolute", "backslash", "empty", "dots", "number"])
def test_file_outside_of_the_folder_raises(raises, make_shards, kind):
    folder = make_shards()
    (folder / "b.safetensors").rename(folder.parent / "b.safetensors")
    named = {
        "parent": "../b.safetensors",
        "absolute": str(folder.parent / "b.safetensors"),
        "backslash": "..\\b.safetensors",
        "empty": "",
        "dots": "..",
        "number": 1,
    }[kind]
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = named
    (folder / INDEX).write_text(json.dumps(index))
    with raises(TensorFileError, field="weight_map['model.norm.weight']", value=named):
        import_model(folder)


@pytest.mark.parametrize("kind", ["fifo", "folder", "dangling"])
def test_shard_that_is_no_regular_file_raises(make_shards, kind):
    folder = make_shards()
    shard = folder / "b.safetensors"
    shard.unlink()
    if kind == "fifo":
        os.mkfifo(shard)  # open() would wait for a writer
    elif kind == "folder":
        shard.mkdir()
    else:
        shard.symlink_to(folder / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"b\.safetensors"):
        import_model(folder)


def test_symbolic_links_of_a_hub_cache_are_followed(make_shards):
    folder = make_shards()
    expected = import_model(folder)[1]
    blobs = folder.parent / "blobs"
    blobs.mkdir()
    for number, file in enumerate(sorted(folder.iterdir())):
        file.rename(blobs / str(number))
        file.symlink_to(Path("..") / "blobs" / str(number))
    jax.tree.map(np.testing.assert_array_equal, import_model(folder)[1], expected)


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:4],
        lambda content: content[:100],
        lambda content: content[:-1],
        lambda _: struct.pack("<Q", 100_000) + b"[" * 100_000,
        lambda _: struct.pack("<Q", 7) + b"no json",
        lambda _: struct.pack("<Q", 2**63),
    ],
    ids=["length", "header", "last byte", "nested", "text", "huge"],
)
def test_damaged_file_raises_with_its_path(make_folder, damage):
    file = make_folder("llama") / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(TensorFileError) as error:
        import_model(file.parent)
    assert error.value.owner == str(file)


def test_too_many_tensors_raise(raises, make_folder):
    file = make_folder("llama") / "model.safetensors"
    empty = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    header = json.dumps({f"t{i}": empty for i in range(300_000)}, separators=(",", ":"))
    file.write_bytes(struct.pack("<Q", len(header)) + header.encode())
    with raises(TensorFileError, field="number of tensors", value=300_000):
        model_config(file.parent)


@pytest.mark.parametrize(
    ("family", "key"),
    [
        ("llama", "num_hidden_layers"),
        ("gemma3_text", "num_hidden_layers"),
        ("mixtral", "num_local_experts"),
        ("qwen3_moe", "num_experts"),
        ("gpt2", "n_layer"),
        ("t5", "num_layers"),
        ("t5", "num_decoder_layers"),
    ],
)
@pytest.mark.parametrize("value", [10**9, 10**18])
def test_more_layers_than_tensors_raise(raises, make_folder, family, key, value):
    folder = make_folder(family, edit={key: value})
    with raises(UnsupportedModelError) as error:
        import_model(folder, repeated=False)
    assert key in error.value.field or "experts" in error.value.field


@pytest.mark.parametrize("key", ["hidden_size", "num_attention_heads", "vocab_size"])
def test_size_above_the_largest_axis_raises(raises, make_folder, key):
    with raises(UnsupportedModelError, field=key, value=10**18):
        import_model(make_folder("llama", edit={key: 10**18}))


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 200_000])
def test_damaged_config_raises(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError) as error:
        model_config(tmp_path)
    assert error.value.owner == str(tmp_path / "config.json")


@pytest.mark.parametrize("dtype", [np.int32, np.uint8, np.bool_])
def test_tensor_of_integers_raises(raises, make_folder, dtype):
    def change(tensors):
        tensors["model.norm.weight"] = np.ones(8, dtype)

    with raises(TensorMismatchError):
        import_model(make_folder("llama", change=change), dtype="float32")


@pytest.mark.parametrize(
    ("number", "dtype", "required"),
    [
        (np.nan, np.float32, None),
        (np.inf, ml_dtypes.bfloat16, None),
        (1e5, np.float32, "float16"),
    ],
)
def test_tensor_that_is_not_finite_raises(raises, make_folder, number, dtype, required):
    def change(tensors):
        tensors["model.layers.1.mlp.up_proj.weight"][2, 3] = number

    folder = make_folder("llama", change=change, dtype=dtype)
    field = "tensor model.layers.1.mlp.up_proj.weight" + (f" in {required}" if required else "")
    with raises(TensorMismatchError, field=field):
        import_model(folder, dtype=required)


@pytest.mark.parametrize(
    ("types", "first", "period"),
    [
        ("1", "", "1"),
        ("1111", "", "1"),
        ("11211211", "", "112"),
        ("1112", "", "1112"),
        ("121", "", "12"),
        ("33322", "333", "2"),
        ("3122122", "3", "122"),
    ],
)
def test_stack_repeats_the_fewest_templates_of_its_layers(types, first, period):
    layers = [Config(Transformer, hidden_dims=int(kind)) for kind in types]
    stack = stack_layers(layers)
    assert [str(template.hidden_dims) for template in stack.first_tpls or ()] == list(first)
    pattern = stack.block_tpls or [stack.layer_tpl]
    assert [str(template.hidden_dims) for template in pattern] == list(period)
    network = Config(TransformerLm, stack_tpl=stack, num_layers=len(types))
    assert all_layers(network) == layers
