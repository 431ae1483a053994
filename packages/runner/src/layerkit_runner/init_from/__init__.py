"""Initializes weights from checkpoints, those of Paxml too, and Hugging Face folders.

settings.py     fields that an experiment sets: `InitFrom`, its sources and their rules
sources.py      readers of checkpoints and Hugging Face folders
pax/            the reader of checkpoints that Paxml wrote
matching.py     the comparison of names and shapes, which reports all differences at once
first_state.py  the state before the first step, each value read into its sharding
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from layerkit.config.lazy_names import lazy_names

if TYPE_CHECKING:
    from layerkit_runner.init_from.first_state import plan_first_state as plan_first_state
    from layerkit_runner.init_from.settings import InitFrom as InitFrom
    from layerkit_runner.init_from.settings import Source as Source

__getattr__, __dir__, __all__ = lazy_names(__name__)
