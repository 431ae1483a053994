"""Turning a model into text: decoders, what they do to logits, and the cached loop."""

from layerkit.decoding.beam_search import BeamSearch as BeamSearch
from layerkit.decoding.cache_rows import row_axes as row_axes
from layerkit.decoding.decoder import Decoder as Decoder
from layerkit.decoding.logit_processors import BannedIds as BannedIds
from layerkit.decoding.logit_processors import CountPenalty as CountPenalty
from layerkit.decoding.logit_processors import LogitBias as LogitBias
from layerkit.decoding.logit_processors import LogitProcessor as LogitProcessor
from layerkit.decoding.logit_processors import MinP as MinP
from layerkit.decoding.logit_processors import MinSteps as MinSteps
from layerkit.decoding.logit_processors import NoRepeatNgrams as NoRepeatNgrams
from layerkit.decoding.logit_processors import RepetitionPenalty as RepetitionPenalty
from layerkit.decoding.logit_processors import RowsSoFar as RowsSoFar
from layerkit.decoding.logit_processors import Temperature as Temperature
from layerkit.decoding.logit_processors import TopK as TopK
from layerkit.decoding.logit_processors import TopP as TopP
from layerkit.decoding.loop import SampleDecoder as SampleDecoder
from layerkit.decoding.loop import extend_prompts as extend_prompts
from layerkit.decoding.samplers import sample_token as sample_token
