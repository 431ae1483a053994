"""Inputs of Lingvo input generators, which are made from params; see docs/lingvo.md.

The module `base_input` has the names of `praxis.base_input`. It imports only `base`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from layerkit.config.lazy_names import lazy_names
from layerkit_inputs.lingvo import base_input as base_input

if TYPE_CHECKING:
    from layerkit_inputs.lingvo.adaptor import LingvoInputAdaptor as LingvoInputAdaptor
    from layerkit_inputs.lingvo.adaptor import (
        LingvoInputAdaptorNewBatchSize as LingvoInputAdaptorNewBatchSize,
    )
    from layerkit_inputs.lingvo.eval_adaptors import LingvoEvalAdaptor as LingvoEvalAdaptor
    from layerkit_inputs.lingvo.eval_adaptors import LingvoLazyEvalAdaptor as LingvoLazyEvalAdaptor
    from layerkit_inputs.lingvo.preflight import prepare as prepare

__getattr__, __dir__, __all__ = lazy_names(__name__)
