"""BaseInput and the adaptors of Lingvo, under the names of `praxis.base_input`.

from layerkit_inputs import base_input

class MyInput(base_input.LingvoInputAdaptor): ...
"""

from __future__ import annotations

from layerkit.config.lazy_names import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    "layerkit_inputs",
    {
        "base.base_input": "BaseInput",
        "lingvo.adaptor": "LingvoInputAdaptor LingvoInputAdaptorNewBatchSize",
        "lingvo.eval_adaptors": "LingvoEvalAdaptor LingvoLazyEvalAdaptor",
    },
)
