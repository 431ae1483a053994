"""The tokenizer of an experiment, which its data sets or its Hugging Face folder have."""

from __future__ import annotations

from typing import Any

from layerkit.config import build, is_config
from layerkit_inputs.tokenizers import Tokenizer
from layerkit_runner.config.config_tree import field_value
from layerkit_runner.config.resolve import ResolvedExperiment
from layerkit_runner.data.infeed import as_usage_error, make_input
from layerkit_runner.errors import UsageError
from layerkit_runner.partitioning import Partitioner


class NoTokenizerError(UsageError):
    """An experiment whose data sets have no tokenizer."""


def find_tokenizer(
    resolved: ResolvedExperiment, partitioner: Partitioner, *, key: str | None = None
) -> Tokenizer:
    """Return the tokenizer of an experiment.

    The config of a data set that has a tokenizer is enough; other data sets are opened.

    Args:
      resolved: The experiment.
      partitioner: Started partitioner.
      key: `src` or `tgt` for data sets with two vocabularies; None for others.
    """
    configs = [*resolved.decode_datasets, *resolved.datasets]
    own = getattr(resolved.experiment, "folder_tokenizer", None)
    candidates: list[Any] = [own()] if own is not None else []
    candidates += [field_value(config, "tokenizer") for config in configs]
    with as_usage_error():
        for config in candidates:
            if is_config(config):
                return build(config)
        for config in configs:
            source = make_input(config, partitioner)
            try:
                found = source.text_tokenizer(key)
            finally:
                source.close()
            if found is not None:
                return found
    raise NoTokenizerError(
        "no tokenizer",
        owner=resolved.name,
        field="datasets",
        value=[field_value(config, "name") for config in configs],
        expected="a data set with a tokenizer, or a folder with tokenizer.json",
        hint="Call generate_ids, score_ids and logits with token ids.",
    )
