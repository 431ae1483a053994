"""Decoders that continue prompts with a model and its cache, and processors of logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from layerkit.config.lazy_names import lazy_names

if TYPE_CHECKING:
    from layerkit.decoding.beam_search import BeamSearch as BeamSearch
    from layerkit.decoding.cache_rows import row_axes as row_axes
    from layerkit.decoding.cached_network import cached_step as cached_step
    from layerkit.decoding.decoder import Decoder as Decoder
    from layerkit.decoding.decoder import Prompts as Prompts
    from layerkit.decoding.logit_processors import BannedIds as BannedIds
    from layerkit.decoding.logit_processors import CountPenalty as CountPenalty
    from layerkit.decoding.logit_processors import EpsilonCutoff as EpsilonCutoff
    from layerkit.decoding.logit_processors import LogitBias as LogitBias
    from layerkit.decoding.logit_processors import LogitProcessor as LogitProcessor
    from layerkit.decoding.logit_processors import MinP as MinP
    from layerkit.decoding.logit_processors import MinSteps as MinSteps
    from layerkit.decoding.logit_processors import NoRepeatNgrams as NoRepeatNgrams
    from layerkit.decoding.logit_processors import RepetitionPenalty as RepetitionPenalty
    from layerkit.decoding.logit_processors import RowOptions as RowOptions
    from layerkit.decoding.logit_processors import RowsSoFar as RowsSoFar
    from layerkit.decoding.logit_processors import Temperature as Temperature
    from layerkit.decoding.logit_processors import TopK as TopK
    from layerkit.decoding.logit_processors import TopP as TopP
    from layerkit.decoding.loop import SampleDecoder as SampleDecoder
    from layerkit.decoding.loop import SampledRows as SampledRows
    from layerkit.decoding.loop import advance_rows as advance_rows
    from layerkit.decoding.loop import extend_prompts as extend_prompts
    from layerkit.decoding.loop import sample_token as sample_token
    from layerkit.decoding.loop import start_prompts as start_prompts
    from layerkit.decoding.speculative import SpeculativeDecoder as SpeculativeDecoder

__getattr__, __dir__, __all__ = lazy_names(__name__)
