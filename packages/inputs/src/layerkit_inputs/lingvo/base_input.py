"""BaseInput and the adaptors of Lingvo, under the names of `praxis.base_input`.

from layerkit_inputs import base_input

class MyInput(base_input.LingvoInputAdaptor): ...
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from layerkit.config.lazy_names import lazy_names

if TYPE_CHECKING:
    from layerkit_inputs.base.base_input import BaseInput as BaseInput
    from layerkit_inputs.lingvo.adaptor import LingvoInputAdaptor as LingvoInputAdaptor
    from layerkit_inputs.lingvo.adaptor import (
        LingvoInputAdaptorNewBatchSize as LingvoInputAdaptorNewBatchSize,
    )
    from layerkit_inputs.lingvo.eval_adaptors import LingvoEvalAdaptor as LingvoEvalAdaptor
    from layerkit_inputs.lingvo.eval_adaptors import LingvoLazyEvalAdaptor as LingvoLazyEvalAdaptor

__getattr__, __dir__, __all__ = lazy_names(__name__)
