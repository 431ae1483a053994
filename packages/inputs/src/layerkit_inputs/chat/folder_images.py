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
_TEXTS = {
    "gemma3": {
        "marker": "<start_of_image>",
        "placeholder": "<image_soft_token>",
        "before": "\n\n<start_of_image>",
        "after": "<end_of_image>\n\n",
    }
}
# Values of settings of a processor that `ChatImages` does not have.
_FIXED = {"do_resize": True, "do_rescale": True, "do_normalize": True, "do_pan_and_scan": False}
_SCALE = 1 / 255
_FILTERS: dict[int, Any] = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}


def folder_images(folder: str, *, max_images: int | None = None) -> Config:
    """Return the config of the images of a folder with `config.json` and the processor's settings.

    The settings are those of `preprocessor_config.json`, or of the images in
    `processor_config.json`, which Transformers 5 writes.

    Args:
      folder: Folder of a model of a family with images: Gemma 3.
      max_images: As in `ChatImages`.

    Raises:
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
    for name, value in _FIXED.items():
        stated = settings.get(name)
        is_same, expected = stated in (None, value), f"{json.dumps(value)}, the supported value"
        require(is_same, where, name, stated, expected, BadRecordError)
    size, scale = settings.get("size", {}), settings.get("rescale_factor", _SCALE)
    has_sides = {*size} == {"height", "width"}
    require(has_sides, where, "size", size, "height and width", BadRecordError)
    is_same = abs(scale - _SCALE) < 1e-6
    require(is_same, where, "rescale_factor", scale, "1/255, the supported value", BadRecordError)
    resample = settings.get("resample", 2)
    expected = f"one of {[*_FILTERS]}"
    require(resample in [*_FILTERS], where, "resample", resample, expected, BadRecordError)
    texts: dict[str, Any] = _TEXTS[kind]
    return ChatImages.HParams.config(
        tokens_per_image=config.get("mm_tokens_per_image", 256),
        mean=tuple(settings.get("image_mean", ChatImages.mean)),
        std=tuple(settings.get("image_std", ChatImages.std)),
        resampling=_FILTERS[resample],
        max_images=max_images,
        **size,
        **texts,
    )


def _read(folder: str, name: str) -> dict[str, Any]:
    path = Path(folder) / f"{name}.json"
    if not path.is_file():
        raise MissingFileError(f"no {path.name} in the folder", field="HF_FOLDER", value=folder)
    try:
        content: dict[str, Any] = json.loads(path.read_bytes())
    except ValueError as error:
        raise BadRecordError(f"{path}: expected JSON ({error})") from error
    return content
