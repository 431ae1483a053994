"""Turning a model into text: the cached loop and the ways to choose a token."""

from layerkit.decoding.loop import SampleDecoder as SampleDecoder
from layerkit.decoding.loop import extend_prompts as extend_prompts
from layerkit.decoding.samplers import sample_token as sample_token
