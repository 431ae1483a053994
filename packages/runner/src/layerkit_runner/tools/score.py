"""`runner score FILE`: perplexity and bits per byte of a text file under a trained model.

The model reads windows of `--max_length` tokens. Each begins `--stride` tokens after the one before
and scores the tokens that those before it have not, so every token has a context of at least
`max_length - stride` tokens, except at the beginning of the file. If no token precedes texts in
training, the first token of the file is only read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

from layerkit.config.checks import require
from layerkit_runner.config.flags import read_flags
from layerkit_runner.config.help import flag_rows, table
from layerkit_runner.errors import as_usage_error
from layerkit_runner.files.text import check_utf8
from layerkit_runner.run_options import Flag, non_negative, positive

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
    is_complete, expected = len(files) == 1 and "model" in values, "one text file, and --model=DIR"
    require(is_complete, "`runner score`", "files", files, expected)
    with as_usage_error(OSError, owner="`runner score`"):
        text = Path(files[0]).read_bytes().decode("utf-8", "surrogateescape")
    check_utf8(text, field=files[0])
    from layerkit_runner.interface.loading import load_folder
    from layerkit_runner.run.model.generation import prompt_ids
    from layerkit_runner.run.programs.lm_eval_program import context_length

    model = load_folder(values["model"], step=values.get("step"), experiment=None, overrides=[])
    length = context_length(model.job, values.get("max_length"))
    stride = values.get("stride") or max(length // 2, 1)
    require(stride < length, None, "--stride", stride, f"less than max_length={length}")
    ids = prompt_ids(text, model.tokenizer, is_source=False)
    require(len(ids) > 1, None, "tokens of the file", len(ids), "at least 2")
    windows = [
        (ids[begin:done], ids[done : begin + length])
        for begin in range(0, max(len(ids) - length, 0) + stride, stride)
        for done in [begin + length - stride if begin else 1]  # end of the window before
    ]
    log_likelihood, size = 0.0, values.get("batch_size", 8)
    for start in range(0, len(windows), size):
        prompts, texts = zip(*windows[start : start + size], strict=True)
        log_likelihood += sum(s.log_likelihood for s in model.score_ids(texts, prompts=prompts))
    nats = -log_likelihood / (len(ids) - 1)
    num_bytes = len(text.encode())
    scores = {
        "tokens": len(ids) - 1,
        "bytes": num_bytes,
        "nats_per_token": nats,
        "perplexity": math.exp(nats),
        "bits_per_byte": -log_likelihood / math.log(2) / num_bytes,
    }
    lines = [f"{name.replace('_', ' '):<16}{value:,.6g}" for name, value in scores.items()]
    print(json.dumps(scores) if values.get("json") else "\n".join(lines), flush=True)
    return 0
