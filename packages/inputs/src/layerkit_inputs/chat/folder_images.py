"""The form of images that the processor of a Hugging Face folder states."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from layerkit.config import Config
from layerkit.config.checks import require
from layerkit_inputs.base.errors import BadRecordError, MissingFileError
from layerkit_inputs.chat.images import ChatImages

# Texts around the placeholders by `model_type`, as the processors of transformers write them.
_QWEN = dict.fromkeys(("marker", "placeholder"), "<|image_pad|>")
_TEXTS = {
    "qwen2_5_vl": _QWEN,
    "qwen3_5": _QWEN,
    "qwen3_5_moe": _QWEN,
    "gemma3": {
        "marker": "<start_of_image>",
        "placeholder": "<image_soft_token>",
        "before": "\n\n<start_of_image>",
        "after": "<end_of_image>\n\n",
    },
}
# Settings of the processor of Qwen's images that a file may leave out.
_QWEN_DEFAULTS = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "resample": 3,
}
# Values of settings of a processor that `ChatImages` does not have.
_FIXED = {"do_resize": True, "do_rescale": True, "do_normalize": True, "do_pan_and_scan": False}
_SCALE = 1 / 255
_FILTERS: dict[int, Any] = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}


def folder_images(
    folder: str,
    *,
    max_images: int | None = None,
    image_size: tuple[int, int] | None = None,
) -> Config:
    """Return the config of the images of a folder with `config.json` and the processor's settings.

    The settings are those of `preprocessor_config.json`, or of the images in
    `processor_config.json`, which Transformers 5 writes.

    Args:
      folder: Folder of a model of a family with images: Gemma 3, Qwen2.5-VL or Qwen 3.5.
      max_images: As in `ChatImages`.
      image_size: (height, width) of all images in pixels, for families whose processor keeps the
        ratio of each image; None for others.

    Raises:
      ConfigError: `image_size` is not one that the processor would give.
      MissingFileError: `config.json` or the settings are missing.
      BadRecordError: The family has no images, a setting is not supported, or a file is no JSON.
    """
    config, where = _read(folder, "config"), f"{folder}/preprocessor_config.json"
    if Path(where).is_file():
        settings = _read(folder, "preprocessor_config")
    else:
        where = f"{folder}/processor_config.json"
        settings = _read(folder, "processor_config").get("image_processor", {})
    kind = config.get("model_type")
    if kind not in _TEXTS:
        raise BadRecordError(
            owner=f"{folder}/config.json", field="model_type", value=kind, choices=[*_TEXTS]
        )
    if _TEXTS[kind] is _QWEN:
        settings = _QWEN_DEFAULTS | settings
    for name, value in _FIXED.items():
        stated = settings.get(name)
        is_same, expected = stated in (None, value), f"{json.dumps(value)}, the supported value"
        require(is_same, where, name, stated, expected, BadRecordError)
    if _TEXTS[kind] is _QWEN:
        size, tokens = _chosen_size(settings, image_size or (0, 0), where)
    else:
        require(image_size is None, None, "image_size", image_size, f"None, for {kind}")
        size, tokens = settings.get("size", {}), config.get("mm_tokens_per_image", 256)
        has_sides = {*size} == {"height", "width"}
        require(has_sides, where, "size", size, "height and width", BadRecordError)
    scale = settings.get("rescale_factor", _SCALE)
    is_same = abs(scale - _SCALE) < 1e-6
    require(is_same, where, "rescale_factor", scale, "1/255, the supported value", BadRecordError)
    resample = settings.get("resample", 2)
    expected = f"one of {[*_FILTERS]}"
    require(resample in [*_FILTERS], where, "resample", resample, expected, BadRecordError)
    texts: dict[str, Any] = _TEXTS[kind]
    return ChatImages.HParams.config(
        tokens_per_image=tokens,
        mean=tuple(settings.get("image_mean", ChatImages.mean)),
        std=tuple(settings.get("image_std", ChatImages.std)),
        resampling=_FILTERS[resample],
        max_images=max_images,
        **size,
        **texts,
    )


def _chosen_size(
    settings: dict[str, Any], image_size: tuple[int, int], where: str
) -> tuple[dict[str, Any], int]:
    """Return the height and width of all images, and the tokens of one, of Qwen's processor."""
    bounds = settings.get("size") or {}
    values = {
        "patch_size": settings.get("patch_size", 14),
        "merge_size": settings.get("merge_size", 2),
        "min_pixels": settings.get("min_pixels") or bounds.get("shortest_edge", 56 * 56),
        "max_pixels": settings.get("max_pixels") or bounds.get("longest_edge", 28 * 28 * 1280),
    }
    for name, value in values.items():
        is_size = type(value) is int and value > 0
        require(is_size, where, name, value, "a positive integer", BadRecordError)
    patch_size, merge_size, fewest, most = values.values()
    side = patch_size * merge_size
    height, width = image_size
    fits = height % side == width % side == 0 and fewest <= height * width <= most
    expected = f"multiples of {side} (height, width), of {fewest} to {most} pixels"
    require(fits, None, "image_size", image_size, expected)
    return {"height": height, "width": width}, (height // side) * (width // side)


def _read(folder: str, name: str) -> dict[str, Any]:
    path = Path(folder) / f"{name}.json"
    if not path.is_file():
        raise MissingFileError(f"no {path.name} in the folder", field="HF_FOLDER", value=folder)
    try:
        content: dict[str, Any] = json.loads(path.read_bytes())
    except ValueError as error:
        raise BadRecordError(f"{path}: expected JSON ({error})") from error
    return content
