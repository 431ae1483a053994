"""Language models in which few layers attend, and the others carry a state of fixed size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from layerkit_experiments.lm.quickstart import LocalText
from layerkit_experiments.recipes.mixers import hybrid_decoder


class HybridText(LocalText):
    """The quickstart with three gated delta nets to each layer with attention (Qwen3-Next)."""

    reduced_fields: ClassVar[Mapping[str, Any]] = {"NUM_LAYERS": 4}

    MIXERS: tuple[str, ...] = (
        "gated_delta_net",
        "gated_delta_net",
        "gated_delta_net",
        "attention",
    )
    """Mixers of the layers of one period, which the stack repeats."""

    model = hybrid_decoder
