"""Models that a task can train."""

from layerkit.models.bert import BertModel as BertModel
from layerkit.models.classification_model import ClassificationModel as ClassificationModel
from layerkit.models.encoder_decoder import TransformerEncoderDecoder as TransformerEncoderDecoder
from layerkit.models.language_model import LanguageModel as LanguageModel
from layerkit.models.preference_model import DpoModel as DpoModel
from layerkit.models.sequence_model import SequenceModel as SequenceModel
from layerkit.models.transformer_lm import TransformerLm as TransformerLm
