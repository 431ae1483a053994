"""`runner score FILE`: perplexity and bits per byte of a text file under a trained model.

The model reads windows of `--max_length` tokens. Each begins `--stride` tokens after the one before
and scores the tokens that those before it have not, so every token has a context of at least
`max_length - stride` tokens, except at the beginning of the file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from layerkit_runner.config.flags import read_flags
from layerkit_runner.config.help import flag_rows, table
from layerkit_runner.errors import UsageError, as_usage_error
from layerkit_runner.files.text import check_utf8
from layerkit_runner.run_options import Flag, non_negative, positive

if TYPE_CHECKING:
    from layerkit_runner.run.model.loaded_model import LoadedModel

_FLAGS = (
    Flag("model", str, "folder of a job, of a checkpoint, or of Hugging Face", "DIR"),
    Flag("step", non_negative, "checkpoint step; by default the newest", "STEP"),
    Flag("max_length", positive, "tokens of a window; by default the length of the model", "N"),
    Flag("stride", positive, "tokens from window to window; by default half a window", "N"),
    Flag("batch_size", positive, "windows that are scored together", "N", default=8),
    Flag("json", bool, "print JSON"),
    Flag("help", bool, "print these flags"),
)


def run_score(words: Sequence[str]) -> int:
    """Print the scores of a text file; return the exit code."""
    values, files = read_flags(words, _FLAGS, takes_words=True)
    if values.get("help"):
        print("\n".join(["runner score FILE --model=DIR [flags]", "", *table(flag_rows(_FLAGS))]))
        return 0
    if len(files) != 1 or "model" not in values:
        expected = "one text file, and --model=DIR"
        raise UsageError(owner="`runner score`", field="files", value=files, expected=expected)
    with as_usage_error(OSError, owner="`runner score`"):
        text = Path(files[0]).read_bytes().decode("utf-8", "surrogateescape")
    check_utf8(text, field=files[0])
    from layerkit_runner.interface.loading import load_folder
    from layerkit_runner.run.programs.lm_eval_program import context_length

    model = load_folder(values["model"], step=values.get("step"), experiment=None, overrides=[])
    length = values.get("max_length") or context_length(model.job)
    stride = values.get("stride") or max(length // 2, 1)
    size = values.get("batch_size", 8)
    scores = score_text(model, text, max_length=length, stride=stride, batch_size=size)
    lines = [f"{name.replace('_', ' '):<16}{value:,.6g}" for name, value in scores.items()]
    print(json.dumps(scores) if values.get("json") else "\n".join(lines), flush=True)
    return 0


def score_text(
    model: LoadedModel, text: str, *, max_length: int, stride: int, batch_size: int = 8
) -> dict[str, float]:
    """Return the scores of a text, of which every token is scored once.

    Args:
      model: Language model with a tokenizer.
      text: The text. Its first token is only read if nothing precedes the texts of training.
      max_length: Number of tokens of a window.
      stride: Number of tokens from one window to the next, less than `max_length`.
      batch_size: Number of windows that are scored together.

    Returns:
      `tokens`, `bytes`, `nats_per_token`, `perplexity` (of a token) and `bits_per_byte`.
    """
    from layerkit_runner.run.model.generation import prompt_ids

    ids, windows, done = prompt_ids(text, model.tokenizer, is_source=False), [], 1
    if stride >= max_length:
        raise UsageError(field="--stride", value=stride, expected=f"less than {max_length=}")
    if len(ids) < 2:
        raise UsageError(field="tokens of the file", value=len(ids), expected="at least 2")
    for begin in range(0, len(ids), stride):
        end = min(begin + max_length, len(ids))
        windows.append((ids[begin:done], ids[done:end]))
        done = end
        if end == len(ids):
            break
    log_likelihood = 0.0
    for start in range(0, len(windows), batch_size):
        prompts, texts = zip(*windows[start : start + batch_size], strict=True)
        log_likelihood += sum(s.log_likelihood for s in model.score_ids(texts, prompts=prompts))
    size = len(text.encode())
    nats = -log_likelihood / (len(ids) - 1)
    return {
        "tokens": len(ids) - 1,
        "bytes": size,
        "nats_per_token": nats,
        "perplexity": math.exp(nats),
        "bits_per_byte": -log_likelihood / math.log(2) / size,
    }
