"""Models that a task can train."""

from __future__ import annotations

from typing import TYPE_CHECKING

from layerkit.config.lazy_names import lazy_names

if TYPE_CHECKING:
    from layerkit.models.attention_decoder_model import (
        AttentionDecoderModel as AttentionDecoderModel,
    )
    from layerkit.models.bert import BertModel as BertModel
    from layerkit.models.best_rq import BestRqModel as BestRqModel
    from layerkit.models.classification_model import ClassificationModel as ClassificationModel
    from layerkit.models.contrastive_model import ContrastiveModel as ContrastiveModel
    from layerkit.models.distillation_model import DistillationModel as DistillationModel
    from layerkit.models.encoder_decoder import (
        TransformerEncoderDecoder as TransformerEncoderDecoder,
    )
    from layerkit.models.language_model import LanguageModel as LanguageModel
    from layerkit.models.preference_model import KtoModel as KtoModel
    from layerkit.models.preference_model import PreferenceModel as PreferenceModel
    from layerkit.models.preference_model import RewardModel as RewardModel
    from layerkit.models.sequence_model import SequenceModel as SequenceModel
    from layerkit.models.speech_model import CtcModel as CtcModel
    from layerkit.models.speech_model import TransducerModel as TransducerModel
    from layerkit.models.transformer_lm import TransformerLm as TransformerLm
    from layerkit.models.weighted_metrics import example_weights as example_weights
    from layerkit.ops.losses.softmax import weighted_mean as weighted_mean

__getattr__, __dir__, __all__ = lazy_names(__name__)
