"""Logits and losses of models of images against Transformers: small random models."""

from __future__ import annotations

import os
import types

import jax.numpy as jnp
import numpy as np
import pytest

from layerkit.config import build
from layerkit.config.nested_map import NestedMap
from layerkit.interop.hugging_face import export_model, import_model
from layerkit.layers import RotaryPositionalEmbedding
from layerkit.layers.vision.image_embedding import PlacedImages

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
pytest.importorskip("safetensors")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 2}
# The last two rows and columns of pixels belong to no patch.
IMAGES = {"hidden_size": 16, "intermediate_size": 24, "image_size": 18, "patch_size": 8, **LAYERS}
TEXTS = {"hidden_size": 12, "intermediate_size": 20, "vocab_size": 30, **LAYERS}
TEXTS |= {"max_position_embeddings": 7}
RANDOM = np.random.default_rng(0)
PIXELS = RANDOM.normal(size=(3, 18, 18, 3)).astype(np.float32)
IDS = RANDOM.integers(0, 28, (3, 7)).astype(np.int32)
IDS[[0, 0, 1, 2], [3, 5, 6, 0]] = 29  # ends


def draw(name, config):
    torch.manual_seed(0)
    model = getattr(transformers, name)(config).eval()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    return model


def largest_difference(ours, theirs):
    expected = theirs.detach().numpy()
    return float(np.abs(ours - expected).max() / np.abs(expected).max())


def test_logits_of_ViT_equal_those_of_transformers(tmp_path, parity_table):
    model = draw("ViTForImageClassification", transformers.ViTConfig(**IMAGES, num_labels=3))
    model.save_pretrained(tmp_path)
    ours, variables = import_model(tmp_path)
    batch = NestedMap(inputs=PIXELS, labels=np.zeros(3, np.int32))
    result = build(ours).apply(variables, batch, method="compute_predictions").logits
    error = largest_difference(result, model(torch.tensor(PIXELS.transpose(0, 3, 1, 2))).logits)
    parity_table.append(("vit", "plain", error))
    assert error < 1e-5


TWO_TOWERS = {
    "CLIPModel": ({"eos_token_id": 29}, {"projection_dim": 8}),
    "CLIPModel-first": ({"eos_token_id": 2}, {}),
    "SiglipModel": ({"projection_size": 16}, {}),
}


@pytest.mark.parametrize("case", TWO_TOWERS)
def test_vectors_and_losses_equal_those_of_transformers(case, tmp_path, parity_table):
    text, options = TWO_TOWERS[case]
    name = case.partition("-")[0]
    config = getattr(transformers, name.replace("Model", "Config"))
    parts = {"text_config": {**TEXTS, **text}, "vision_config": IMAGES}
    model = draw(name, config(**parts, **options))
    model.save_pretrained(tmp_path / "theirs")
    ours, variables = import_model(tmp_path / "theirs", repeated=name == "CLIPModel")
    batch = NestedMap(images=PIXELS, ids=IDS)
    result = build(ours).apply(variables, batch, method="compute_predictions")
    images = torch.tensor(PIXELS.transpose(0, 3, 1, 2))
    expected = model(pixel_values=images, input_ids=torch.tensor(IDS), return_loss=True)
    pairs = ((result.images, expected.image_embeds), (result.texts, expected.text_embeds))
    for vectors, theirs in pairs:
        unit = vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)
        error = largest_difference(unit, theirs)
        parity_table.append((model.config.model_type, case, error))
        assert error < 1e-5
    mean = np.mean(result.per_example_loss)
    np.testing.assert_allclose(mean, expected.loss.item(), rtol=1e-5)
    export_model(tmp_path / "ours", ours, variables)
    again = type(model).from_pretrained(tmp_path / "ours").state_dict()
    before = model.state_dict()
    assert again.keys() == before.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in before.items())


GEMMA3 = {"hidden_size": 16, "head_dim": 8, "num_key_value_heads": 1, "sliding_window": 5}
GEMMA3 |= {"layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 8}
PLACEHOLDER = 7


def test_logits_of_Gemma3_with_images_equal_those_of_transformers(tmp_path, parity_table):
    vision = {**IMAGES, "image_size": 24, "patch_size": 6, "vision_use_head": False}
    config = transformers.Gemma3Config(
        text_config={**TEXTS, **GEMMA3},
        vision_config=vision,
        mm_tokens_per_image=4,
        image_token_index=PLACEHOLDER,
    )
    model = draw("Gemma3ForConditionalGeneration", config)
    model.save_pretrained(tmp_path / "theirs")
    ours, variables = import_model(tmp_path / "theirs")
    images = RANDOM.normal(size=(2, 2, 24, 24, 3)).astype(np.float32)
    ids = RANDOM.integers(8, 28, (2, 14)).astype(np.int32)
    ids[:, 2:6] = ids[:, 8:12] = PLACEHOLDER
    outputs = build(ours).apply(
        variables, ids, images=images, method=lambda m, ids, **images: m.lm.logits(ids, **images)
    )
    expected = model(
        input_ids=torch.tensor(ids, dtype=torch.long),
        pixel_values=torch.tensor(images.reshape(-1, 24, 24, 3).transpose(0, 3, 1, 2)),
        token_type_ids=torch.tensor(ids == PLACEHOLDER, dtype=torch.long),
    ).logits
    error = largest_difference(outputs, expected)
    parity_table.append(("gemma3", "images", error))
    assert error < 1e-5
    export_model(tmp_path / "ours", ours, variables)
    again = type(model).from_pretrained(tmp_path / "ours").state_dict()
    before = model.state_dict()
    assert again.keys() == before.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in before.items())


QWEN_TEXT = {"hidden_size": 24, "intermediate_size": 20, "vocab_size": 40, **LAYERS}
QWEN_TEXT |= {"num_key_value_heads": 1, "eos_token_id": 39}
AXES = {"rope_type": "default", "rope_theta": 100.0}
DELTA = {"layer_types": ["full_attention", "linear_attention"], "head_dim": 12}
DELTA |= {"linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 4}
DELTA |= {"linear_value_head_dim": 4, "rope_parameters": {**AXES, "mrope_section": [1, 1, 1]}}
DELTA["rope_parameters"]["partial_rotary_factor"] = 0.5
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
MIXTURE |= {"shared_expert_intermediate_size": 8}
TOWER = {"depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 4}
TOWER |= {"out_hidden_size": 24}
QWEN = {
    # Windows of 4 x 4 patches do not divide the grids of 6 x 10.
    "Qwen2_5_VL": (
        {"rope_parameters": {**AXES, "mrope_section": [1, 3, 2]}},
        {"window_size": 16, "fullatt_block_indexes": [1]},
    ),
    "Qwen3_5": (DELTA, {"num_position_embeddings": 25}),
    "Qwen3_5Moe": ({**DELTA, **MIXTURE}, {"num_position_embeddings": 25}),
}


@pytest.fixture(params=QWEN)
def qwen(request):
    """A model of Transformers, images `[rows, 2, 24, 40, 3]`, ids, and what the model reads."""
    text, vision = QWEN[request.param]
    tokens = {"image": PLACEHOLDER, "video": 1, "vision_start": 2, "vision_end": 3}
    config = getattr(transformers, f"{request.param}Config")(
        text_config={**QWEN_TEXT, **text},
        vision_config={**TOWER, **vision},
        **{f"{name}_token_id": token for name, token in tokens.items()},
    )
    model = draw(f"{request.param}ForConditionalGeneration", config)
    images = RANDOM.normal(size=(2, 2, 24, 40, 3)).astype(np.float32)
    ids = RANDOM.integers(8, 38, (2, 39)).astype(np.int32)
    ids[:, 2:17] = ids[:, 20:35] = PLACEHOLDER
    return model, images, ids


def read_by_qwen(images, ids):
    """Return the inputs of Transformers, whose patches are in the order of its processor."""
    processor = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    patchify = processor.Qwen2VLImageProcessorPil.patchify
    flat = images.reshape(-1, *images.shape[-3:])
    patches = [patchify(None, one.transpose(2, 0, 1), 4, 2, 2)[0] for one in flat]
    return {
        "input_ids": torch.tensor(ids, dtype=torch.long),
        "pixel_values": torch.tensor(np.concatenate(patches)),
        "image_grid_thw": torch.tensor([[1, 6, 10]] * len(flat)),
        "mm_token_type_ids": torch.tensor(ids == PLACEHOLDER, dtype=torch.int),
    }


def test_logits_of_Qwen_with_images_equal_those_of_transformers(qwen, tmp_path, parity_table):
    model, images, ids = qwen
    model.save_pretrained(tmp_path / "theirs")
    ours, variables = import_model(tmp_path / "theirs")
    outputs = build(ours).apply(
        variables, ids, images=images, method=lambda m, ids, **images: m.lm.logits(ids, **images)
    )
    inputs = read_by_qwen(images, ids)
    expected = model(**inputs).logits
    error = largest_difference(outputs, expected)
    parity_table.append((model.config.model_type, "images", error))
    assert error < 1e-5
    export_model(tmp_path / "ours", ours, variables)
    again = type(model).from_pretrained(tmp_path / "ours")
    tensors, before = again.state_dict(), model.state_dict()
    assert tensors.keys() == before.keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in before.items())
    assert largest_difference(again(**inputs).logits.detach().numpy(), expected) < 1e-5


def test_greedy_decoding_of_Qwen_equals_that_of_transformers(qwen, tmp_path):
    model, images, ids = qwen
    model.save_pretrained(tmp_path)
    ours, variables = import_model(tmp_path)
    ours.decoder.set(temperature=0.0, max_decode_steps=4, eos_id=None)
    lengths = np.array([39, 19], np.int32)
    batch = NestedMap(ids=ids, prompt_lengths=lengths, images=images)
    outputs = build(ours).apply(variables, batch, method="decode")
    for row, (length, count) in enumerate(zip(lengths, (2, 1), strict=True)):
        inputs = read_by_qwen(images[row, :count], ids[row : row + 1, :length])
        expected = model.generate(
            **inputs, max_new_tokens=4, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        np.testing.assert_array_equal(outputs.ids[row, : length + 4], expected[0])


ROTARY = {
    "qwen2_5_vl": ("Qwen2_5_VL", "Qwen2_5_VLRotaryEmbedding", "blocks", (1, 3, 2)),
    "qwen3_5": ("Qwen3_5", "Qwen3_5TextRotaryEmbedding", "interleaved", (3, 2, 1)),
}


@pytest.mark.parametrize("family", ROTARY)
def test_grid_positions_and_sections_rotate_as_in_transformers(family):
    stem, rotary_class, order, sections = ROTARY[family]
    qwen = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
    parameters = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": list(sections)}
    parameters["partial_rotary_factor"] = 1.0
    text = {**TEXTS, "hidden_size": 24, "head_dim": 12, "rope_parameters": parameters}
    config = getattr(transformers, f"{stem}Config")(text_config=text)
    ids = RANDOM.integers(8, 28, (1, 22)).astype(np.int32)
    ids[:, 2:8] = ids[:, 10:16] = PLACEHOLDER
    is_image = ids == PLACEHOLDER
    placed = PlacedImages(
        jnp.zeros((1, 2, 2, 3, 1)),
        before=np.cumsum(is_image, axis=1) - is_image,
        numbers=np.where(is_image, np.cumsum(is_image, axis=1) - 1, -1),
        sees_whole_image=False,
        has_grid_positions=True,
    )
    positions = placed.positions(np.arange(22)[None])
    model = types.SimpleNamespace(config=config)
    for name in ("get_vision_position_ids", "get_rope_index"):
        method = getattr(getattr(qwen, f"{stem}Model"), name)
        setattr(model, name, types.MethodType(method, model))
    grids, kinds = torch.tensor([[1, 4, 6], [1, 4, 6]]), torch.tensor(is_image, dtype=torch.int)
    expected, _ = model.get_rope_index(torch.tensor(ids), kinds, image_grid_thw=grids)
    np.testing.assert_array_equal(np.moveaxis(positions, -1, 0), expected)
    heads = RANDOM.normal(size=(1, 22, 2, 12)).astype(np.float32)
    layer = RotaryPositionalEmbedding(
        dims=12, max_timescale=100.0, sections=sections, section_order=order
    )
    theirs = torch.tensor(heads.swapaxes(1, 2))
    cos, sin = getattr(qwen, rotary_class)(config.text_config)(theirs, expected)
    rotated, _ = qwen.apply_rotary_pos_emb(theirs, theirs, cos, sin)
    ours = layer.apply({}, heads, positions)
    np.testing.assert_allclose(ours, rotated.numpy().swapaxes(1, 2), atol=1e-5)
