"""Decoding defaults of a Hugging Face folder, as `generate` of Transformers reads them.

They are in generation_config.json, or in config.json if the folder lacks that file. What is not
stated there has the default of Transformers: greedy decoding, and `top_k=50` for sampling. Only the
number of new tokens is then that of our decoders, since Transformers stops after 20.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from layerkit.config import Config, build
from layerkit.config.checks import check_choice, require
from layerkit.decoding import BannedIds, MinSteps, NoRepeatNgrams, SampleDecoder
from layerkit.errors import ConfigError, short_repr
from layerkit.interop.hugging_face.folder import CONFIG, eos_id, read_json, write_json

GENERATION_CONFIG = "generation_config.json"

# Options that our decoders lack and that change the output, unless they have this value or are
# null, false, 0 or empty.
# fmt: off
_UNSUPPORTED: dict[str, Any] = {
    "constraints": None, "dola_layers": None,
    "encoder_no_repeat_ngram_size": None, "encoder_repetition_penalty": 1, "epsilon_cutoff": None,
    "eta_cutoff": None, "exponential_decay_length_penalty": None, "force_words_ids": None,
    "forced_bos_token_id": None, "forced_eos_token_id": None, "guidance_scale": 1,
    "max_time": None, "min_length": None, "num_beams": 1, "num_return_sequences": 1,
    "penalty_alpha": None, "sequence_bias": None, "stop_strings": None, "token_healing": None,
    "top_h": None, "typical_p": 1, "watermarking_config": None,
}
# Those that Transformers reads in one mode alone, by whether it samples.
_OF_MODE = {True: {"epsilon_cutoff", "eta_cutoff", "top_h", "typical_p"}, False: {"penalty_alpha"}}
_SUPPORTED = frozenset({
    "bad_words_ids", "begin_suppress_tokens", "do_sample", "max_length", "max_new_tokens",
    "min_new_tokens", "min_p", "no_repeat_ngram_size", "repetition_penalty", "suppress_tokens",
    "temperature", "top_k", "top_p",
})
# fmt: on
# Keys of fields that have other names here.
_KEYS = {
    "max_decode_steps": "max_new_tokens or max_length",
    "min_decode_steps": "min_new_tokens",
    "size": "no_repeat_ngram_size",
}
_IDS = frozenset({"bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"})


def decoder_config(folder: str | os.PathLike[str]) -> Config:
    """Return the config of a `SampleDecoder` with the defaults and the end tokens of a folder.

    Raises:
      FileNotFoundError: The folder has no config.json.
      ConfigError: A value has a wrong type or is out of range.
    """
    name, content = _read(folder)
    end = eos_id(folder)
    ends = end if isinstance(end, tuple) else (end,)
    try:
        decoder = SampleDecoder.HParams.config(**_fields(content, ends), eos_id=end)
        build(decoder)  # checks the values
    except ConfigError as error:
        error.owner = str(Path(folder) / name)
        error.field = _KEYS.get(error.field or "", error.field)
        raise
    except (TypeError, ValueError) as error:
        problem = f"invalid default of decoding: {error}"
        raise ConfigError(problem, owner=str(Path(folder) / name)) from error
    return decoder


def speech_prompt(
    folder: str | os.PathLike[str], *, language: str = "en", task: str = "transcribe"
) -> tuple[int, ...]:
    """Return the ids after the start token by which Whisper writes a text without timestamps.

    Args:
      folder: Folder whose generation_config.json has the ids.
      language: Code of the spoken language. A model of English alone has no ids of languages and
        tasks, and takes the defaults only.
      task: `transcribe`, or `translate` into English.

    Raises:
      FileNotFoundError: The folder has no config.json.
      ConfigError: The model has no such language or task, or is no Whisper.
    """
    name, content = _read(folder)
    owner = str(Path(folder) / name)
    last, expected = (
        content.get("no_timestamps_token_id"),
        "an id, as in generation_config.json of Whisper",
    )
    require(last is not None, owner, "no_timestamps_token_id", None, expected)
    # A model of English alone has neither table.
    languages = content.get("lang_to_id", {"<|en|>": None})
    tasks = content.get("task_to_id", {"transcribe": None})
    check_choice(owner, [code.strip("<|>") for code in languages], language=language)
    check_choice(owner, tasks, task=task)
    ids = (languages[f"<|{language}|>"], tasks[task], last)
    return tuple(token for token in ids if token is not None)


def generation_notes(folder: str | os.PathLike[str], decoder: Config) -> list[str]:
    """Return lines for reports: the options of a decoder, and those of the folder that it lacks.

    Args:
      folder: Folder of the defaults.
      decoder: Config that `decoder_config` returned, perhaps with other values since.
    """
    name, content = _read(folder)
    is_greedy = decoder.temperature == 0
    names = ["repetition_penalty"]
    names += [] if is_greedy else ["temperature", "top_k", "top_p", "min_p"]
    names += ["min_decode_steps", "max_length" if decoder.max_length else "max_decode_steps"]
    values = {key: getattr(decoder, key) for key in names}
    if decoder.processors:
        names = ["no_repeat_ngram_size", "suppress_tokens", "begin_suppress_tokens"]
        names += ["bad_words_ids"]
        values |= {key: short_repr(content[key]) for key in names if content.get(key)}
    shown = ["greedy"] * is_greedy + [f"{key}={value}" for key, value in values.items() if value]
    lines = [f"generation   {', '.join(shown)}, by default ({name})"]
    if lacking := _unsupported(content):
        shown = [f"{key}={short_repr(value)}" for key, value in lacking.items()]
        lines.append(f"generation   unsupported and not applied: {', '.join(shown)} ({name})")
    return lines


def export_defaults(source: str | os.PathLike[str], target: Path) -> None:
    """Write defaults in the config.json of a folder to the generation_config.json of another."""
    name, content = _read(source)
    options = {*_SUPPORTED, *_UNSUPPORTED}
    if name == CONFIG and options & set(content):
        kept = {key: content[key] for key in sorted(options | _IDS) if key in content}
        write_json(target, GENERATION_CONFIG, kept)


def _read(folder: str | os.PathLike[str]) -> tuple[str, dict[str, Any]]:
    """Return the name of the file with the defaults, and its entries that are not null."""
    name = GENERATION_CONFIG if (Path(folder) / GENERATION_CONFIG).is_file() else CONFIG
    content = read_json(folder, name)
    return name, {key: value for key, value in content.items() if value is not None}


def _fields(content: Mapping[str, Any], ends: Collection[int | None]) -> dict[str, Any]:
    """Return the fields of the decoder; `ends` are the end tokens."""
    if not isinstance(content.get("do_sample", False), bool):
        raise ConfigError(field="do_sample", value=content["do_sample"], expected="true or false")
    top_p, penalty = content.get("top_p", 1.0), content.get("repetition_penalty", 1.0)
    fields: dict[str, Any] = {
        "temperature": content.get("temperature", 1.0) if _samples(content) else 0.0,
        "top_k": content.get("top_k", 50) or None,
        "top_p": None if top_p == 1 else top_p,
        "min_p": content.get("min_p") or None,
        "repetition_penalty": None if penalty == 1 else penalty,
        "processors": [],
    }
    if size := content.get("no_repeat_ngram_size"):
        fields["processors"].append(NoRepeatNgrams.HParams.config(size=size))
    # Transformers never excludes an end token by bad words.
    words = {word[0] for word in content.get("bad_words_ids", ()) if len(word) == 1} - set(ends)
    banned = {*content.get("suppress_tokens", ()), *words}
    if banned:
        fields["processors"].append(BannedIds.HParams.config(ids=tuple(sorted(banned))))
    if first := content.get("begin_suppress_tokens"):
        not_first = MinSteps.HParams.config(num_steps=1, eos_ids=tuple(first))
        fields["processors"].append(not_first)
    if "max_new_tokens" in content:
        fields["max_decode_steps"] = content["max_new_tokens"]
    elif "max_length" in content:
        fields["max_decode_steps"] = fields["max_length"] = content["max_length"]
    fields["min_decode_steps"] = content.get("min_new_tokens", 0)
    return fields


def _samples(content: Mapping[str, Any]) -> bool:
    return content.get("do_sample") is True


def _unsupported(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that our decoders lack and that would change the output."""
    ignored = _OF_MODE[not _samples(content)]
    options = {
        key: value
        for key, without_effect in _UNSUPPORTED.items()
        if (value := content.get(key)) and value != without_effect and key not in ignored
    }
    if words := [word for word in content.get("bad_words_ids", ()) if len(word) > 1]:
        options["bad_words_ids"] = words
    return options
