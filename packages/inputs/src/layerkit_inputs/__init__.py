"""layerkit_inputs: where batches come from.

The names below are the package's face. They are looked up when first used, so that importing the
package costs nothing and a reader's own dependencies are loaded only by those who use it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from layerkit_inputs._version import __version__ as __version__

if TYPE_CHECKING:
    from layerkit_inputs.base_input import BaseInput as BaseInput
    from layerkit_inputs.feeds import Feed as Feed
    from layerkit_inputs.feeds import FeedPlan as FeedPlan
    from layerkit_inputs.feeds import plan_feeds as plan_feeds
    from layerkit_inputs.indexed_input import IndexedInput as IndexedInput
    from layerkit_inputs.local_text import LocalText as LocalText
    from layerkit_inputs.local_text import LocalTextPrompts as LocalTextPrompts
    from layerkit_inputs.packing import pack_documents as pack_documents
    from layerkit_inputs.prefetch import Prefetch as Prefetch
    from layerkit_inputs.specs import ArraySpec as ArraySpec
    from layerkit_inputs.specs import batch_specs as batch_specs
    from layerkit_inputs.specs import check_batch as check_batch
    from layerkit_inputs.synthetic import SyntheticInput as SyntheticInput

_MODULE_OF = {
    "ArraySpec": "specs",
    "BaseInput": "base_input",
    "Feed": "feeds",
    "FeedPlan": "feeds",
    "IndexedInput": "indexed_input",
    "LocalText": "local_text",
    "LocalTextPrompts": "local_text",
    "Prefetch": "prefetch",
    "SyntheticInput": "synthetic",
    "batch_specs": "specs",
    "check_batch": "specs",
    "pack_documents": "packing",
    "plan_feeds": "feeds",
}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        from layerkit.near_names import near_names

        raise AttributeError(f"layerkit_inputs has no name {name!r}{near_names(name, __all__)}")
    return getattr(importlib.import_module(f"layerkit_inputs.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
