"""Inputs: readers that produce batches of NumPy arrays for training, evaluation and decoding.

The public names below are imported when first used. So importing the package is fast, and the
dependencies of a reader are loaded only if it is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from layerkit_inputs._version import __version__ as __version__

if TYPE_CHECKING:
    from layerkit_inputs.bad_records import BadRecordError as BadRecordError
    from layerkit_inputs.base_input import BaseInput as BaseInput
    from layerkit_inputs.errors import MissingExtraError as MissingExtraError
    from layerkit_inputs.features import encoder_decoder_features as encoder_decoder_features
    from layerkit_inputs.features import lm_features as lm_features
    from layerkit_inputs.features import prompt_features as prompt_features
    from layerkit_inputs.feeds import Feed as Feed
    from layerkit_inputs.feeds import FeedPlan as FeedPlan
    from layerkit_inputs.feeds import plan_feeds as plan_feeds
    from layerkit_inputs.first_fit import cut_documents as cut_documents
    from layerkit_inputs.first_fit import plan_packing as plan_packing
    from layerkit_inputs.generated_digits import GeneratedDigits as GeneratedDigits
    from layerkit_inputs.grain_adaptor.array_records import ArrayRecordFiles as ArrayRecordFiles
    from layerkit_inputs.grain_adaptor.iter_input import GrainIterInput as GrainIterInput
    from layerkit_inputs.grain_adaptor.map_input import ArrayRecordRows as ArrayRecordRows
    from layerkit_inputs.grain_adaptor.map_input import GrainMapInput as GrainMapInput
    from layerkit_inputs.grain_adaptor.parquet_rows import ParquetRows as ParquetRows
    from layerkit_inputs.hugging_face.columns import HuggingFaceColumns as HuggingFaceColumns
    from layerkit_inputs.hugging_face.input import HuggingFaceInput as HuggingFaceInput
    from layerkit_inputs.hugging_face.input import HuggingFacePrompts as HuggingFacePrompts
    from layerkit_inputs.hugging_face.pairs import HuggingFacePairs as HuggingFacePairs
    from layerkit_inputs.hugging_face.stream import HuggingFaceStream as HuggingFaceStream
    from layerkit_inputs.idx_images import IdxImages as IdxImages
    from layerkit_inputs.indexed_input import IndexedInput as IndexedInput
    from layerkit_inputs.lingvo_adaptor.adaptor import LingvoInputAdaptor as LingvoInputAdaptor
    from layerkit_inputs.lingvo_adaptor.adaptor import (
        LingvoInputAdaptorNewBatchSize as LingvoInputAdaptorNewBatchSize,
    )
    from layerkit_inputs.lingvo_adaptor.eval_adaptors import LingvoEvalAdaptor as LingvoEvalAdaptor
    from layerkit_inputs.lingvo_adaptor.eval_adaptors import (
        LingvoLazyEvalAdaptor as LingvoLazyEvalAdaptor,
    )
    from layerkit_inputs.local_text import LocalText as LocalText
    from layerkit_inputs.local_text import LocalTextPrompts as LocalTextPrompts
    from layerkit_inputs.mixing.batch_mixture import BatchMixture as BatchMixture
    from layerkit_inputs.mixing.batch_mixture import StreamMixture as StreamMixture
    from layerkit_inputs.mixing.mixture import Mixture as Mixture
    from layerkit_inputs.mixing.multi_input import MultiInput as MultiInput
    from layerkit_inputs.number_words import NumberWords as NumberWords
    from layerkit_inputs.packing import pack_documents as pack_documents
    from layerkit_inputs.prefetch import Prefetch as Prefetch
    from layerkit_inputs.seqio_adaptor.eval_inputs import (
        get_eval_hparams_for_seqio as get_eval_hparams_for_seqio,
    )
    from layerkit_inputs.seqio_adaptor.input import SeqIOInput as SeqIOInput
    from layerkit_inputs.specs import ArraySpec as ArraySpec
    from layerkit_inputs.specs import batch_specs as batch_specs
    from layerkit_inputs.specs import check_batch as check_batch
    from layerkit_inputs.stream_packer import StreamPacker as StreamPacker
    from layerkit_inputs.synthetic import SyntheticInput as SyntheticInput
    from layerkit_inputs.text_pairs import ParallelText as ParallelText
    from layerkit_inputs.text_pairs import TextPairs as TextPairs
    from layerkit_inputs.time_series import CsvSeries as CsvSeries
    from layerkit_inputs.time_series import GeneratedSeries as GeneratedSeries
    from layerkit_inputs.token_records import TokenRecords as TokenRecords
    from layerkit_inputs.tokenizers import ByteTokenizer as ByteTokenizer
    from layerkit_inputs.tokenizers import HuggingFaceTokenizer as HuggingFaceTokenizer
    from layerkit_inputs.tokenizers import SentencePieceTokenizer as SentencePieceTokenizer
    from layerkit_inputs.tokenizers import Tokenizer as Tokenizer
    from layerkit_inputs.tokenizers import tokenizer_config as tokenizer_config
    from layerkit_inputs.window_shuffle import WindowShuffle as WindowShuffle

_MODULE_OF = {
    "ArrayRecordFiles": "grain_adaptor.array_records",
    "ArrayRecordRows": "grain_adaptor.map_input",
    "ArraySpec": "specs",
    "BadRecordError": "bad_records",
    "BaseInput": "base_input",
    "BatchMixture": "mixing.batch_mixture",
    "ByteTokenizer": "tokenizers",
    "CsvSeries": "time_series",
    "Feed": "feeds",
    "FeedPlan": "feeds",
    "GeneratedDigits": "generated_digits",
    "GeneratedSeries": "time_series",
    "GrainIterInput": "grain_adaptor.iter_input",
    "GrainMapInput": "grain_adaptor.map_input",
    "HuggingFaceColumns": "hugging_face.columns",
    "HuggingFaceInput": "hugging_face.input",
    "HuggingFacePairs": "hugging_face.pairs",
    "HuggingFacePrompts": "hugging_face.input",
    "HuggingFaceStream": "hugging_face.stream",
    "HuggingFaceTokenizer": "tokenizers",
    "IdxImages": "idx_images",
    "IndexedInput": "indexed_input",
    "LingvoEvalAdaptor": "lingvo_adaptor.eval_adaptors",
    "LingvoInputAdaptor": "lingvo_adaptor.adaptor",
    "LingvoInputAdaptorNewBatchSize": "lingvo_adaptor.adaptor",
    "LingvoLazyEvalAdaptor": "lingvo_adaptor.eval_adaptors",
    "LocalText": "local_text",
    "LocalTextPrompts": "local_text",
    "MissingExtraError": "errors",
    "Mixture": "mixing.mixture",
    "MultiInput": "mixing.multi_input",
    "NumberWords": "number_words",
    "ParallelText": "text_pairs",
    "ParquetRows": "grain_adaptor.parquet_rows",
    "Prefetch": "prefetch",
    "SentencePieceTokenizer": "tokenizers",
    "SeqIOInput": "seqio_adaptor.input",
    "StreamMixture": "mixing.batch_mixture",
    "StreamPacker": "stream_packer",
    "SyntheticInput": "synthetic",
    "TextPairs": "text_pairs",
    "TokenRecords": "token_records",
    "Tokenizer": "tokenizers",
    "WindowShuffle": "window_shuffle",
    "batch_specs": "specs",
    "check_batch": "specs",
    "cut_documents": "first_fit",
    "encoder_decoder_features": "features",
    "get_eval_hparams_for_seqio": "seqio_adaptor.eval_inputs",
    "lm_features": "features",
    "pack_documents": "packing",
    "plan_feeds": "feeds",
    "tokenizer_config": "tokenizers",
    "plan_packing": "first_fit",
    "prompt_features": "features",
}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        from layerkit.errors import UnknownNameError

        raise UnknownNameError("unknown name", owner=__name__, value=name, choices=__all__)
    return getattr(importlib.import_module(f"layerkit_inputs.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
