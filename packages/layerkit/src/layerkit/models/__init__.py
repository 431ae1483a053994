"""Models that a task can train."""

from layerkit.models.language_model import LanguageModel as LanguageModel
from layerkit.models.transformer_lm import TransformerLm as TransformerLm
