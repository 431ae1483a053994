"""Inputs of Lingvo input generators, which are made from params; see docs/lingvo.md."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from layerkit_inputs.lingvo_adaptor.adaptor import LingvoInputAdaptor as LingvoInputAdaptor
    from layerkit_inputs.lingvo_adaptor.adaptor import (
        LingvoInputAdaptorNewBatchSize as LingvoInputAdaptorNewBatchSize,
    )
    from layerkit_inputs.lingvo_adaptor.eval_adaptors import LingvoEvalAdaptor as LingvoEvalAdaptor
    from layerkit_inputs.lingvo_adaptor.eval_adaptors import (
        LingvoLazyEvalAdaptor as LingvoLazyEvalAdaptor,
    )
    from layerkit_inputs.lingvo_adaptor.preflight import prepare as prepare

_MODULE_OF = {
    "LingvoEvalAdaptor": "eval_adaptors",
    "LingvoInputAdaptor": "adaptor",
    "LingvoInputAdaptorNewBatchSize": "adaptor",
    "LingvoLazyEvalAdaptor": "eval_adaptors",
    "prepare": "preflight",
}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        from layerkit.errors import UnknownNameError

        raise UnknownNameError("unknown name", owner=__name__, value=name, choices=__all__)
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return list(__all__)
