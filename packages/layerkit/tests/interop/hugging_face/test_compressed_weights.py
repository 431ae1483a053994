"""Compressed weights: packed as the compression libraries pack them, and read back."""

from __future__ import annotations

import functools
import json

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from layerkit.base.weight_formats import NF4_VALUES
from layerkit.config import build
from layerkit.interop.hugging_face import (
    TensorFileError,
    TensorMismatchError,
    UnsupportedModelError,
    compressed,
    export_model,
    import_model,
    load_weights,
    model_config,
    stored_dtype,
)
from layerkit.interop.hugging_face.compressed.tensors import open_tensors
from layerkit.layers.quantization.stored_weights import dequantize_model, quantize_model

DRAW = np.random.default_rng(0)
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "mlp_bias": False}
FP8 = np.dtype(ml_dtypes.float8_e4m3fn)


def pack(values, axis, bits=4, order=()):
    """Pack integers [rows, columns] into int32 along an axis, each group in an order."""
    count = 32 // bits
    values = np.moveaxis(values, axis, 1).astype(np.uint32)
    values = np.pad(values, [(0, 0), (0, -values.shape[1] % count)])
    values = values.reshape(len(values), -1, count)[:, :, list(order or range(count))]
    packed = np.bitwise_or.reduce(values << np.arange(0, 32, bits, dtype=np.uint32), axis=2)
    return np.ascontiguousarray(np.moveaxis(packed.view(np.int32), 1, axis))


def fp8(name, blocks=(None, None), dtype=np.float32, **more):
    def compress(weight):
        sizes = [block or size for block, size in zip(blocks, weight.shape, strict=True)]
        shape = [-(-size // block) for size, block in zip(weight.shape, sizes, strict=True)]
        scale, values = DRAW.uniform(0.5, 2, shape).astype(dtype), weight.astype(FP8)
        factors = np.kron(scale.astype(np.float32), np.ones(sizes, np.float32))
        dense = values.astype(np.float32) * factors[: weight.shape[0], : weight.shape[1]]
        return {"weight": values, name: scale if blocks[0] else scale.reshape(()), **more}, dense

    return compress


def int8_rows(weight):
    absmax = np.abs(weight).max(1)
    values = np.round(weight * 127 / absmax[:, None]).astype(np.int8)
    dense = values.astype(np.float32) * absmax[:, None] * np.float32(7.874015748031496e-3)
    return {"weight": values, "SCB": absmax, "weight_format": np.uint8(0)}, dense


def grouped(weight, bits=4, *, order=None, has_zeros=True, size=32):
    """Return integers [inputs, outputs], zero points and scales [groups, outputs], and groups."""
    outputs, inputs = weight.shape
    index = (np.arange(inputs) if order is None else order) // size
    codes = DRAW.integers(0, 1 << bits, (inputs, outputs))
    zeros = DRAW.integers(1, 1 << bits, (-(-inputs // size), outputs))
    zeros = zeros if has_zeros else np.full_like(zeros, 1 << (bits - 1))
    scales = DRAW.uniform(0.1, 1, zeros.shape).astype(np.float16)
    dense = (codes - zeros[index]).astype(np.float32) * scales[index].astype(np.float32)
    return codes, zeros, scales, index.astype(np.int32), dense.T


def gptq(bits=4, version=1, *, acts=False, with_index=True):
    def compress(weight):
        order = DRAW.permutation(weight.shape[1]) if acts else None
        codes, zeros, scales, index, dense = grouped(weight, bits, order=order)
        tensors = {"qweight": pack(codes, 0, bits), "scales": scales}
        tensors["qzeros"] = pack(zeros - (version == 1), 1, bits)
        return tensors | ({"g_idx": index} if with_index else {}), dense

    return compress


def awq(weight):
    codes, zeros, scales, _, dense = grouped(weight)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    packed = {"qweight": pack(codes, 1, order=order), "qzeros": pack(zeros, 1, order=order)}
    return {**packed, "scales": scales}, dense


def packed_int(bits=4, *, has_zeros=False, size=32):
    def compress(weight):
        codes, zeros, scales, _, dense = grouped(weight, bits, has_zeros=has_zeros, size=size)
        tensors = {"weight_packed": pack(codes.T, 1, bits), "weight_scale": scales.T.copy()}
        tensors["weight_shape"] = np.array(weight.shape)
        if has_zeros:
            tensors["weight_zero_point"] = pack(zeros.T, 0, bits)
        return tensors, dense

    return compress


def nf4(*, nested=False):
    def compress(weight):
        table = np.array(NF4_VALUES, np.float32)
        blocks = weight.reshape(-1, 64)
        absmax = np.abs(blocks).max(1)
        state = {"quant_type": "nf4", "blocksize": 64, "shape": list(weight.shape)}
        tensors = {"weight.absmax": absmax}
        if nested:
            outer_table = np.sort(DRAW.uniform(-1, 1, 256)).astype(np.float32)
            state |= {"nested_blocksize": 4, "nested_offset": 2.25, "nested_dtype": "float32"}
            outer = DRAW.uniform(1, 2, -(-absmax.size // 4)).astype(np.float32)
            scaled = (absmax - 2.25) / np.repeat(outer, 4)[: absmax.size]
            indices = np.abs(outer_table - scaled[:, None]).argmin(1).astype(np.uint8)
            absmax = outer_table[indices] * np.repeat(outer, 4)[: absmax.size] + np.float32(2.25)
            tensors = {"weight.absmax": indices, "weight.nested_absmax": outer}
            tensors["weight.nested_quant_map"] = outer_table
        codes = np.abs(table - (blocks / absmax[:, None])[..., None]).argmin(-1).reshape(-1)
        tensors["weight"] = (codes[::2] << 4 | codes[1::2]).astype(np.uint8)[:, None]
        text = json.dumps(state).encode()
        tensors["weight.quant_state.bitsandbytes__nf4"] = np.frombuffer(text, np.uint8)
        dense = table[codes].reshape(blocks.shape) * absmax[:, None]
        return {**tensors, "weight.quant_map": table}, dense.reshape(weight.shape)

    return compress


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
INTS = {"quant_method": "compressed-tensors", "format": "pack-quantized", "sparsity_config": {}}
FLOATS = {**INTS, "format": "float-quantized", "kv_cache_scheme": None, "config_groups": {"a": {}}}
GROUPS_OF_40 = {"config_groups": {"a": {"weights": {"group_size": 40}}}}
IN_BLOCKS = {"config_groups": {"a": {"weights": {"block_structure": [48, 48]}}}}
BLOCKS = {"quant_method": "fp8", "weight_block_size": [48, 48], "fmt": "e4m3"}
WHOLE = {**BLOCKS, "weight_block_size": None, "activation_scheme": "static"}
NF4 = {"_load_in_4bit": True, "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
CASES = {
    "fp8": (fp8("weight_scale_inv", (48, 48)), BLOCKS),
    "fp8 whole": (fp8("weight_scale_inv", activation_scale=np.float32(2)), WHOLE),
    "fp8 rows": (fp8("weight_scale", (1, None), ml_dtypes.bfloat16), FLOATS),
    "fp8 groups": (fp8("weight_scale", (1, 32)), FLOATS),
    "fp8 last group": (fp8("weight_scale", (1, 40)), {**FLOATS, **GROUPS_OF_40}),
    "fp8 blocks": (fp8("weight_scale", (48, 48)), {**FLOATS, **IN_BLOCKS}),
    "fbgemm": (fp8("weight_scale", (1, None)), {"quant_method": "fbgemm_fp8"}),
    "int8": (int8_rows, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
    "gptq": (gptq(), GPTQ),
    "gptq of old files": (gptq(with_index=False), {**GPTQ, "checkpoint_format": "gptq"}),
    "gptq desc_act": (gptq(acts=True), {**GPTQ, "desc_act": True}),
    "gptq v2": (gptq(version=2), {**GPTQ, "checkpoint_format": "gptq_v2"}),
    "gptq 8 bits": (gptq(8), {**GPTQ, "bits": 8}),
    "gptq 2 bits": (gptq(2), {**GPTQ, "bits": 2}),
    "awq": (awq, AWQ),
    "packed": (packed_int(), INTS),
    "packed 8 bits": (packed_int(8), INTS),
    "packed last group": (packed_int(size=40), {**INTS, **GROUPS_OF_40}),
    "packed zeros": (packed_int(has_zeros=True), INTS),
    "nf4": (nf4(), NF4),
    "nf4 nested": (nf4(nested=True), {**NF4, "bnb_4bit_use_double_quant": True}),
}


@pytest.fixture
def make_compressed(make_folder):
    """Return a function that writes a folder of a case; decoded weights go into `dense`."""

    def make(case, family="llama", *, dense=None, edit=lambda tensors: None, keys=None, **sizes):
        method, options = CASES[case]

        def change(tensors):
            for name in [name for name in tensors if name.endswith("_proj.weight")]:
                parts, weight = method(tensors.pop(name))
                if dense is not None:
                    dense[name] = np.ascontiguousarray(weight, np.float32)
                stem = name.removesuffix("weight")
                tensors.update({stem + part: np.asarray(value) for part, value in parts.items()})
            edit(tensors)

        options = {"quantization_config": {**options, **(keys or {})}}
        return make_folder(family, change=change, edit=options, **{**SIZES, **sizes})

    return make


def place_shards(variables):
    """Return the shapes of variables whose last axes are divided over 4 x 2 devices."""
    mesh = Mesh(np.reshape(jax.devices()[:8], (4, 2)), ("fsdp", "tensor"))

    def place(leaf):
        axes = [axis for axis, size in enumerate(leaf.shape) if axis and size % 4 == 0][-2:]
        names = dict(zip(axes, ("tensor", "fsdp"), strict=False))
        spec = PartitionSpec(*map(names.get, range(leaf.ndim)))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(place, variables)


@pytest.mark.parametrize("case", CASES)
def test_compressed_weights_are_those_of_the_decoded_folder(
    monkeypatch, make_folder, make_compressed, case
):
    monkeypatch.setattr(compressed.tensors, "_CHUNK", 200)  # some rows at a time
    dense = {}
    folder = make_compressed(case, dense=dense)
    config, variables = import_model(folder)
    sharded = load_weights(folder, build(config), like=place_shards(variables))
    source = open_tensors(folder)
    for name, weight in dense.items():
        bounds = [sorted(DRAW.choice(size + 1, 2, replace=False)) for size in weight.shape]
        part = weight[tuple(slice(*one) for one in bounds)]
        np.testing.assert_array_equal(source.read(name, bounds), part)
    plain, expected = import_model(make_folder("llama", change=lambda t: t.update(dense), **SIZES))
    assert config == plain
    jax.tree.map(np.testing.assert_array_equal, variables, expected)
    jax.tree.map(np.testing.assert_array_equal, sharded, expected)


def test_weights_of_nf4_are_stored_as_nf4_without_loss(make_compressed):
    config, variables = import_model(make_compressed("nf4", intermediate_size=128))
    stored_config, stored = quantize_model(config, variables, weight_format="nf4:64")
    restored = dequantize_model(stored_config, stored)[1]
    jax.tree.map(np.testing.assert_array_equal, restored, variables)


def test_memory_does_not_depend_on_stated_sizes_of_blocks(make_compressed):
    state = {"shape": [96, 64], "blocksize": 1 << 40}

    def edit(tensors):
        tensors[STEM + STATE] = np.frombuffer(json.dumps(state).encode(), np.uint8)
        tensors[STEM + "weight.absmax"] = np.ones(1, np.float32)

    source = open_tensors(make_compressed("nf4", edit=edit))
    assert source.read(STEM + "weight", [(90, 96), (0, 64)]).max() == 1


def test_export_writes_plain_weights(make_compressed, tmp_path, read_tensors):
    dense = {}
    sizes = {"moe_intermediate_size": 32, "head_dim": 16}
    folder = make_compressed("gptq", "qwen3_moe", dense=dense, **sizes)
    content = json.loads((folder / "config.json").read_text())
    for stated, dtype in (("float16", "float16"), (None, "bfloat16"), ("float8_e5m2", "bfloat16")):
        (folder / "config.json").write_text(json.dumps({**content, "torch_dtype": stated}))
        assert stored_dtype(folder) == dtype
        dtypes = {leaf.dtype.name for leaf in jax.tree.leaves(import_model(folder)[1])}
        assert dtypes == {"float32", dtype}
    (folder / "config.json").write_text(json.dumps(content))
    export_model(tmp_path / "out", *import_model(folder), tokenizer_folder=folder)
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())
    written = read_tensors(tmp_path / "out")
    for name, weight in dense.items():
        np.testing.assert_array_equal(written[name], weight)


def test_biases_of_zeros_are_neutral(make_compressed):
    name = "model.layers.0.mlp.up_proj.bias"
    make = functools.partial(make_compressed, "gptq")
    import_model(make(edit=lambda tensors: tensors.update({name: np.zeros(96, np.float16)})))
    with pytest.raises(TensorMismatchError, match=name):
        import_model(make(edit=lambda tensors: tensors.update({name: np.ones(96, np.float16)})))


# quantization_config of DeepSeek-V3, gpt-oss-20b, Qwen2.5-7B-Instruct-GPTQ-Int4, a folder of
# GPTQModel, Qwen2.5-7B-Instruct-AWQ, a 4-bit folder of Unsloth, and Kimi-K2-Thinking.
PUBLISHED = """
{"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
{"modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"], "quant_method": "mxfp4"}
{"batch_size": 1, "bits": 4, "block_name_to_quantize": null, "cache_block_outputs": true, "damp_percent": 0.01, "dataset": null, "desc_act": false, "exllama_config": {"version": 1}, "group_size": 128, "max_input_length": null, "model_seqlen": null, "module_name_preceding_first_block": null, "modules_in_block_to_quantize": null, "pad_token_id": null, "quant_method": "gptq", "sym": true, "tokenizer": null, "true_sequential": true, "use_cuda_fp16": false, "use_exllama": true}
{"bits": 4, "checkpoint_format": "gptq", "desc_act": true, "dynamic": null, "group_size": 128, "lm_head": false, "meta": {"damp_percent": 0.01, "quantizer": ["gptqmodel:1.4.5"]}, "pack_dtype": "int32", "quant_method": "gptq", "sym": true}
{"bits": 4, "group_size": 128, "modules_to_not_convert": null, "quant_method": "awq", "version": "gemm", "zero_point": true}
{"_load_in_4bit": true, "_load_in_8bit": false, "bnb_4bit_compute_dtype": "bfloat16", "bnb_4bit_quant_storage": "uint8", "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": true, "llm_int8_enable_fp32_cpu_offload": false, "llm_int8_has_fp16_weight": false, "llm_int8_skip_modules": null, "llm_int8_threshold": 6.0, "load_in_4bit": true, "load_in_8bit": false, "quant_method": "bitsandbytes"}
{"config_groups": {"group_0": {"input_activations": null, "output_activations": null, "targets": ["Linear"], "weights": {"actorder": null, "block_structure": null, "dynamic": false, "group_size": 32, "num_bits": 4, "observer": "minmax", "observer_kwargs": {}, "strategy": "group", "symmetric": true, "type": "int"}}}, "format": "pack-quantized", "ignore": ["lm_head", "re:.*self_attn.*"], "kv_cache_scheme": null, "quant_method": "compressed-tensors", "quantization_status": "compressed"}
"""  # noqa: E501


def test_published_compressions_are_read():
    for text in PUBLISHED.strip().splitlines():
        options = json.loads(text)
        read = compressed.tensors.compression_of({"quantization_config": options})
        assert read == (compressed.tensors.METHODS[options["quant_method"]], options)


@pytest.mark.parametrize(
    ("case", "keys", "named"),
    [
        ("gptq", {"quant_method": "aqlm"}, "quant_method"),
        ("gptq", {"bits": 3}, "bits"),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format"),
        ("gptq", {"dynamic": {"a": {"bits": 8}}}, "dynamic"),
        ("awq", {"version": "gemv"}, "version"),
        ("fp8", {"fmt": "e5m2"}, "fmt"),
        ("packed", {"format": "marlin-24"}, "format"),
        ("fp8 rows", {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
    ],
)
def test_unsupported_compression_raises(raises, make_compressed, case, keys, named):
    folder = make_compressed(case, keys=keys)
    field, owner = f"quantization_config.{named}", str(folder / "config.json")
    for function in (import_model, model_config, open_tensors):
        with raises(UnsupportedModelError, field=field, value=keys[named], owner=owner):
            function(folder)


STEM = "model.layers.1.mlp.up_proj."
ZEROS = np.zeros((64, 2), np.int32)
STATE = "weight.quant_state.bitsandbytes__nf4"


@pytest.mark.parametrize(
    ("case", "name", "value"),
    [
        ("fp8", "weight_scale_inv", np.ones((3, 2), np.float32)),
        ("fp8", "weight_scale_inv", np.ones((1, 1), np.float32)),
        ("fp8", "weight_scale_inv", np.ones((2, 2), np.int32)),
        ("gptq", "qzeros", None),
        ("gptq", "scales", np.ones((2, 95), np.float16)),
        ("gptq", "g_idx", np.full(64, 2, np.int32)),
        ("gptq", "g_idx", np.full(64, -1, np.int32)),
        ("gptq", "weight", np.ones((96, 64), np.float32)),
        ("awq", "qzeros", ZEROS),
        ("packed", "weight_shape", np.array([1 << 60, 64])),
        ("packed", "weight_scale", np.ones((96, 0), np.float16)),
        ("int8", "weight_format", np.array(2, np.uint8)),
        ("nf4", "weight.absmax", np.ones(3, np.float32)),
        ("nf4", STATE, np.frombuffer(b"[" * 4096, np.uint8)),
        ("nf4", STATE, np.frombuffer(b'{"shape": [1', np.uint8)),
        ("nf4", STATE, np.frombuffer(b'{"shape": [96, 64], "blocksize": 0}', np.uint8)),
        ("nf4", STATE, np.frombuffer(b'{"shape": [960000, 64], "blocksize": 64}', np.uint8)),
    ],
)
def test_tensors_that_do_not_fit_raise(make_compressed, case, name, value):
    def edit(tensors):
        tensors[STEM + name] = value
        tensors.update({} if value is not None else {STEM + name: tensors.pop(STEM + "scales")})

    with pytest.raises(TensorFileError, match=STEM.removesuffix(".")):
        import_model(make_compressed(case, edit=edit))


@pytest.mark.parametrize(
    ("case", "keys"),
    [
        ("gptq of old files", {"desc_act": True}),
        ("packed", {"config_groups": {"a": {"weights": {"actorder": "group"}}}}),
    ],
)
def test_order_of_inputs_that_is_stated_but_absent_raises(make_compressed, case, keys):
    with pytest.raises(TensorFileError, match="g_idx"):
        open_tensors(make_compressed(case, keys=keys))


def test_mxfp4_is_that_of_transformers(make_folder):
    torch = pytest.importorskip("torch")
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    dense = {}

    def change(tensors):
        for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
            experts, inputs, outputs = tensors.pop(name).shape
            blocks = DRAW.integers(0, 256, (experts, outputs, inputs // 32, 16)).astype(np.uint8)
            scales = DRAW.integers(110, 130, blocks.shape[:-1]).astype(np.uint8)
            both = {"_blocks": blocks, "_scales": scales}
            tensors.update({name + part: value for part, value in both.items()})
            arrays = map(torch.tensor, both.values())
            dense[name] = mxfp4.convert_moe_packed_tensors(*arrays, dtype=torch.float32).numpy()

    options = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.embed_tokens"]}
    folder = make_folder("gpt_oss", change=change, edit={"quantization_config": options}, **SIZES)
    config, variables = import_model(folder)
    sharded = load_weights(folder, build(config), like=place_shards(variables))
    folder = make_folder("gpt_oss", change=lambda tensors: tensors.update(dense), **SIZES)
    for loaded in (variables, sharded):
        jax.tree.map(np.testing.assert_array_equal, loaded, import_model(folder)[1])


BITS = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "double": {"load_in_4bit": True, "bnb_4bit_use_double_quant": True},
    "int8": {"load_in_8bit": True},
}


@pytest.mark.parametrize("case", ["fp8", *BITS])
def test_logits_are_those_of_transformers(tmp_path, read_tensors, case):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    numpy = pytest.importorskip("safetensors.numpy")
    pytest.importorskip("accelerate")
    torch.manual_seed(0)
    sizes = {"hidden_size": 192, "intermediate_size": 192, "num_hidden_layers": 2, "head_dim": 48}
    sizes |= {"vocab_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    load = functools.partial(transformers.AutoModelForCausalLM.from_pretrained, device_map="cpu")
    transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes)).save_pretrained(tmp_path)
    if case == "fp8":
        tensors = read_tensors(tmp_path)
        for name in [name for name in tensors if "_proj.weight" in name]:
            parts = CASES["fp8"][0](tensors.pop(name))[0]
            tensors.update({name.removesuffix("weight") + part: parts[part] for part in parts})
        numpy.save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
        content = json.loads((tmp_path / "config.json").read_text())
        content["quantization_config"] = {**BLOCKS, "dequantize": True}
        (tmp_path / "config.json").write_text(json.dumps(content))
        theirs = load(tmp_path)
    else:
        pytest.importorskip("bitsandbytes")
        options = transformers.BitsAndBytesConfig(**BITS[case])
        load(tmp_path, quantization_config=options).save_pretrained(tmp_path / "bits")
        tmp_path /= "bits"
        theirs = load(tmp_path).dequantize()
    ids = np.arange(24).reshape(2, 12)
    with torch.no_grad():
        expected = theirs(torch.tensor(ids)).logits.numpy()
    config, variables = import_model(tmp_path)
    ours = build(config).apply(variables, ids, method=lambda model, ids: model.lm.logits(ids))
    assert np.abs(ours - expected).max() < 1e-5 * np.abs(expected).max()
