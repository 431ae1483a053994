"""Adapters in folders of PEFT: LoRA, rsLoRA and DoRA.

    config, variables = import_adapters({"path/to/adapter": 1.0}, config, variables)
    export_adapters("path/to/other", config, variables, base_folder="path/to/model")

The modules of an adapter have the names of the tensors of its model, so the tables of the families
name them too.
"""

from layerkit.interop.peft.exporting import export_adapters as export_adapters
from layerkit.interop.peft.importing import add_adapters as add_adapters
from layerkit.interop.peft.importing import import_adapters as import_adapters
