"""Forms of published models that import does not read, and how to convert them."""

from __future__ import annotations

from pathlib import Path

_SAVE = "Load it in Transformers{how}, and save it with save_pretrained(NEW_FOLDER)."
# Patterns of the files of each form, its name, and the conversion.
_FORMS = (
    (
        ["adapter_config.json"],
        "adapters of PEFT",
        "Give the folder of their model, and this one in ADAPTERS (docs/hugging_face.md).",
    ),
    (["*.gguf"], "a GGUF file", _SAVE.format(how=" with gguf_file=NAME")),
    (
        ["consolidated*"],
        "weights under the names of their authors",
        "Use the folder of the same model in the format of Transformers, with model*.safetensors.",
    ),
    (["*.bin", "*.pth"], "weights as pickles", _SAVE.format(how="")),
    (
        ["tf_model.h5", "flax_model*.msgpack"],
        "weights of TensorFlow or Flax",
        _SAVE.format(how=" before version 5, with from_tf=True or from_flax=True"),
    ),
    (
        ["*.safetensors"],
        "tensors without their index or under another name",
        "Download the index, or rename the file if it is the whole model.",
    ),
    (["snapshots"], "a cache of the Hub", "Use one of the folders in snapshots."),
)


def other_form(folder: str | Path) -> str:
    """Return sentences about the form in which a folder has a model; empty if it has none."""
    folder = Path(folder)
    if folder.is_file():
        return " That is a file. Give the folder that contains it."
    for patterns, form, conversion in _FORMS:
        if matches := sorted(path for pattern in patterns for path in folder.glob(pattern)):
            return f" The folder has {form} ({matches[0].name}). {conversion}"
    return ""
