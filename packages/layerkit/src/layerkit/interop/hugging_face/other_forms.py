"""Forms of published models that import does not read, and how to convert them."""

from __future__ import annotations

from pathlib import Path

_SAVE = "Load it in Transformers, {how}, and save it with save_pretrained(NEW_FOLDER)."
# Pattern of a file of each form, its name, and the conversion.
_FORMS = (
    (
        "adapter_config.json",
        "adapters of PEFT",
        "Merge them into their model: PeftModel.from_pretrained(MODEL, FOLDER)"
        ".merge_and_unload().save_pretrained(NEW_FOLDER).",
    ),
    ("*.gguf", "a GGUF file", _SAVE.format(how="with gguf_file=NAME")),
    (
        "consolidated*",
        "weights under the names of their authors",
        "Use the folder of the same model in the format of Transformers, with model*.safetensors.",
    ),
    ("pytorch_model*", "weights as pickles", _SAVE.format(how="which reads them")),
    ("*.bin", "weights as pickles", _SAVE.format(how="which reads them")),
    ("*.pth", "weights as pickles", _SAVE.format(how="which reads them")),
    (
        "tf_model.h5",
        "weights of TensorFlow",
        _SAVE.format(how="before version 5, with from_tf=True"),
    ),
    (
        "flax_model*.msgpack",
        "weights of Flax",
        _SAVE.format(how="before version 5, with from_flax=True"),
    ),
    ("*.safetensors", "tensors under another name", "Rename the file if it is the whole model."),
    ("snapshots", "a cache of the Hub", "Use one of the folders in snapshots."),
)


def other_form(folder: str | Path) -> str:
    """Return sentences about the form in which a folder has a model; empty if it has none."""
    folder = Path(folder)
    if folder.is_file():
        return " That is a file. Give the folder that contains it."
    for pattern, form, conversion in _FORMS:
        if match := next(iter(sorted(folder.glob(pattern))), None):
            return f" The folder has {form} ({match.name}). {conversion}"
    return ""
