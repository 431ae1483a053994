"""Inputs: readers that produce batches of NumPy arrays for training, evaluation and decoding.

The public names below are imported when first used. So importing the package is fast, and the
dependencies of a reader are loaded only if it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from layerkit.config.lazy_names import lazy_names

if TYPE_CHECKING:
    from layerkit_inputs._version import __version__ as __version__
    from layerkit_inputs.arrays.csv_series import CsvSeries as CsvSeries
    from layerkit_inputs.arrays.idx_images import IdxImages as IdxImages
    from layerkit_inputs.audio.audio_files import AudioFiles as AudioFiles
    from layerkit_inputs.audio.audio_files import SpeechInput as SpeechInput
    from layerkit_inputs.base.base_input import BaseInput as BaseInput
    from layerkit_inputs.base.errors import BadRecordError as BadRecordError
    from layerkit_inputs.base.errors import MissingExtraError as MissingExtraError
    from layerkit_inputs.base.host_batches import ArraySpec as ArraySpec
    from layerkit_inputs.base.host_batches import Feed as Feed
    from layerkit_inputs.base.host_batches import FeedPlan as FeedPlan
    from layerkit_inputs.base.host_batches import check_batch as check_batch
    from layerkit_inputs.base.host_batches import plan_feeds as plan_feeds
    from layerkit_inputs.base.indexed_input import IndexedInput as IndexedInput
    from layerkit_inputs.base.prefetch import Prefetch as Prefetch
    from layerkit_inputs.base.tokenizer_interface import Tokenizer as Tokenizer
    from layerkit_inputs.chat.chat_input import ChatInput as ChatInput
    from layerkit_inputs.chat.chat_input import ChatPrompts as ChatPrompts
    from layerkit_inputs.chat.images import ChatImages as ChatImages
    from layerkit_inputs.chat.preference_input import JudgementInput as JudgementInput
    from layerkit_inputs.chat.preference_input import PairInput as PairInput
    from layerkit_inputs.chat.preference_input import reference_log_probs as reference_log_probs
    from layerkit_inputs.grain.array_records import ArrayRecordFiles as ArrayRecordFiles
    from layerkit_inputs.grain.iter_input import GrainIterInput as GrainIterInput
    from layerkit_inputs.grain.map_input import ArrayRecordRows as ArrayRecordRows
    from layerkit_inputs.grain.map_input import GrainMapInput as GrainMapInput
    from layerkit_inputs.hugging_face.pairs import HuggingFacePairs as HuggingFacePairs
    from layerkit_inputs.hugging_face.stream import HuggingFaceStream as HuggingFaceStream
    from layerkit_inputs.hugging_face.text_input import HuggingFaceInput as HuggingFaceInput
    from layerkit_inputs.hugging_face.text_input import HuggingFacePrompts as HuggingFacePrompts
    from layerkit_inputs.images.data_sets import HuggingFaceImages as HuggingFaceImages
    from layerkit_inputs.images.data_sets import ImageRows as ImageRows
    from layerkit_inputs.images.data_sets import TfdsImages as TfdsImages
    from layerkit_inputs.images.image_folder import ImageFolder as ImageFolder
    from layerkit_inputs.images.image_input import ImageInput as ImageInput
    from layerkit_inputs.images.web_dataset import WebDataset as WebDataset
    from layerkit_inputs.lingvo import base_input as base_input
    from layerkit_inputs.lingvo.adaptor import LingvoInputAdaptor as LingvoInputAdaptor
    from layerkit_inputs.lingvo.adaptor import (
        LingvoInputAdaptorNewBatchSize as LingvoInputAdaptorNewBatchSize,
    )
    from layerkit_inputs.lingvo.eval_adaptors import LingvoEvalAdaptor as LingvoEvalAdaptor
    from layerkit_inputs.lingvo.eval_adaptors import LingvoLazyEvalAdaptor as LingvoLazyEvalAdaptor
    from layerkit_inputs.mixing.mixture import Mixture as Mixture
    from layerkit_inputs.mixing.multi_input import MultiInput as MultiInput
    from layerkit_inputs.mixing.stored_rows import StoredRows as StoredRows
    from layerkit_inputs.packing.first_fit import cut_documents as cut_documents
    from layerkit_inputs.packing.first_fit import plan_packing as plan_packing
    from layerkit_inputs.packing.model_features import (
        encoder_decoder_features as encoder_decoder_features,
    )
    from layerkit_inputs.packing.model_features import lm_features as lm_features
    from layerkit_inputs.packing.model_features import prompt_features as prompt_features
    from layerkit_inputs.packing.stream_packer import StreamPacker as StreamPacker
    from layerkit_inputs.parquet.parquet_rows import ParquetRows as ParquetRows
    from layerkit_inputs.seqio.eval_inputs import (
        get_eval_hparams_for_seqio as get_eval_hparams_for_seqio,
    )
    from layerkit_inputs.seqio.seqio_input import SeqIOInput as SeqIOInput
    from layerkit_inputs.synthetic.generated_digits import GeneratedDigits as GeneratedDigits
    from layerkit_inputs.synthetic.generated_series import GeneratedSeries as GeneratedSeries
    from layerkit_inputs.synthetic.number_words import NumberWords as NumberWords
    from layerkit_inputs.synthetic.random_tokens import SyntheticInput as SyntheticInput
    from layerkit_inputs.text.local_text import LocalText as LocalText
    from layerkit_inputs.text.local_text import LocalTextPrompts as LocalTextPrompts
    from layerkit_inputs.text.text_pairs import ParallelText as ParallelText
    from layerkit_inputs.text.text_pairs import TextPairs as TextPairs
    from layerkit_inputs.text.token_files import TokenFiles as TokenFiles
    from layerkit_inputs.text.token_records import TokenRecords as TokenRecords
    from layerkit_inputs.text.tokenizers import ByteTokenizer as ByteTokenizer
    from layerkit_inputs.text.tokenizers import HuggingFaceTokenizer as HuggingFaceTokenizer
    from layerkit_inputs.text.tokenizers import SentencePieceTokenizer as SentencePieceTokenizer
    from layerkit_inputs.text.tokenizers import tokenizer_config as tokenizer_config

__getattr__, __dir__, __all__ = lazy_names(__name__)
