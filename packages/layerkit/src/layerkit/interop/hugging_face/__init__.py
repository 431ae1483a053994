"""Import and export of models in Hugging Face folders.

    config, variables = import_model("path/to/folder")
    logits = build(config).apply(variables, …)
    export_model("path/to/other", config, variables, tokenizer_folder="path/to/folder")

Each family of models is a module with two tables: one from keys of config.json to fields, and one
from tensors to weights. Import and export use both tables.
"""

from layerkit.interop.hugging_face.exporting import export_model as export_model
from layerkit.interop.hugging_face.families import FAMILIES as FAMILIES
from layerkit.interop.hugging_face.folder import TensorFileError as TensorFileError
from layerkit.interop.hugging_face.folder import eos_id as eos_id
from layerkit.interop.hugging_face.folder import max_length as max_length
from layerkit.interop.hugging_face.folder import stored_dtype as stored_dtype
from layerkit.interop.hugging_face.folder import tokenizer_file as tokenizer_file
from layerkit.interop.hugging_face.generation import decoder_config as decoder_config
from layerkit.interop.hugging_face.generation import generation_notes as generation_notes
from layerkit.interop.hugging_face.generation import speech_prompt as speech_prompt
from layerkit.interop.hugging_face.importing import TensorMismatchError as TensorMismatchError
from layerkit.interop.hugging_face.importing import import_model as import_model
from layerkit.interop.hugging_face.importing import load_weights as load_weights
from layerkit.interop.hugging_face.importing import model_config as model_config
from layerkit.interop.hugging_face.keys import UnsupportedModelError as UnsupportedModelError
