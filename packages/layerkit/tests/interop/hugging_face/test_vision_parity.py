"""Logits and losses of models of images against Transformers: small random models."""

from __future__ import annotations

import os

import numpy as np
import pytest

from layerkit.config import build
from layerkit.config.nested_map import NestedMap
from layerkit.interop.hugging_face import export_model, import_model

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
    found = build(ours).apply(variables, batch, method="compute_predictions").logits
    error = largest_difference(found, model(torch.tensor(PIXELS.transpose(0, 3, 1, 2))).logits)
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
    found = build(ours).apply(variables, batch, method="compute_predictions")
    images = torch.tensor(PIXELS.transpose(0, 3, 1, 2))
    expected = model(pixel_values=images, input_ids=torch.tensor(IDS), return_loss=True)
    pairs = ((found.images, expected.image_embeds), (found.texts, expected.text_embeds))
    for vectors, theirs in pairs:
        unit = vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)
        error = largest_difference(unit, theirs)
        parity_table.append((model.config.model_type, case, error))
        assert error < 1e-5
    mean = np.mean(found.per_example_loss)
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
