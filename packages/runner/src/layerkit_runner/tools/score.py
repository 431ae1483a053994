"""`runner score FILE`: perplexity and bits per byte of a text file under a trained model.

The model reads windows of `--max_length` tokens. Each begins `--stride` tokens after the one before
and scores the tokens that those before it have not, so every token has a context of at least
`max_length - stride` tokens, except at the beginning of the file. If no token precedes texts in
training, the first token of the file is only read; bits per byte count its bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from layerkit.config.checks import require
from layerkit_runner.config.help import read_words
from layerkit_runner.errors import as_usage_error
from layerkit_runner.files.text import check_utf8, printable
from layerkit_runner.run_options import Flag, html_file, non_negative, positive
from layerkit_runner.tools.pages.page import render_page, write_page
from layerkit_runner.tools.pages.tokens import read_tokens

if TYPE_CHECKING:
    from layerkit_inputs.base.tokenizer_interface import Tokenizer

_TOKENS_SHOWN = 6000
_BARS = 100

_FLAGS = (
    Flag("model", str, "folder of a job, of a checkpoint, or of Hugging Face", "DIR"),
    Flag("step", non_negative, "checkpoint step; by default the newest", "STEP"),
    Flag("max_length", positive, "tokens of a window; by default the length of the model", "N"),
    Flag("stride", positive, "tokens from window to window; by default half a window", "N"),
    Flag("batch_size", positive, "windows that are scored together", "N", default=8),
    Flag("json", bool, "print JSON"),
    Flag("html", html_file, "write the loss of each token to this file, as a page", "FILE"),
)


def run_score(words: Sequence[str]) -> int:
    """Print the scores of a text file; return the exit code."""
    page = "runner score FILE --model=DIR [flags]"
    if (read := read_words(words, _FLAGS, page=page)) is None:
        return 0
    values, files = read
    is_complete, expected = len(files) == 1 and values["model"], "one text file, and --model=DIR"
    require(is_complete, "`runner score`", "files", files, expected)
    with as_usage_error(OSError, owner="`runner score`"):
        text = Path(files[0]).read_bytes().decode("utf-8", "surrogateescape")
    check_utf8(text, field=files[0])
    from layerkit_runner.interface.loading import load_folder
    from layerkit_runner.run.model.generation import prompt_ids
    from layerkit_runner.run.programs.lm_eval_program import context_length

    model = load_folder(values["model"], step=values["step"], experiment=None, overrides=[])
    length = context_length(model.job, values["max_length"])
    stride = values["stride"] or max(length // 2, 1)
    require(stride < length, None, "--stride", stride, f"less than max_length={length}")
    ids = prompt_ids(text, model.tokenizer, is_source=False)
    require(len(ids) > 1, None, "tokens of the file", len(ids), "at least 2")
    windows = [
        (ids[begin:done], ids[done : begin + length])
        for begin in range(0, max(len(ids) - length, 0) + stride, stride)
        for done in [begin + length - stride if begin else 1]  # end of the window before
    ]
    log_probs, size = [], values["batch_size"]
    for start in range(0, len(windows), size):
        prompts, texts = zip(*windows[start : start + size], strict=True)
        log_probs += [s.token_log_probs for s in model.score_ids(texts, prompts=prompts)]
    losses = -np.concatenate(log_probs).astype(np.float64)
    nats = float(losses.mean())
    num_bytes = len(text.encode())
    scores = {
        "tokens": len(losses),
        "bytes": num_bytes,
        "nats_per_token": nats,
        "perplexity": math.exp(nats) if nats < 709 else math.inf,  # the largest float
        "bits_per_byte": float(losses.sum()) / math.log(2) / num_bytes,
    }
    lines = [f"{name.replace('_', ' '):<16}{value:,.6g}" for name, value in scores.items()]
    if values["html"]:
        page = score_page(Path(files[0]).name, scores, ids, losses, model.tokenizer)
        lines.append(f"wrote {write_page(values['html'], page)}")
    print(json.dumps(scores) if values["json"] else "\n".join(lines), flush=True)
    return 0


def score_page(
    name: str,
    scores: Mapping[str, float],
    ids: Sequence[int],
    losses: np.ndarray,
    tokenizer: Tokenizer,
) -> str:
    """Return the page of a text: its figures, ids `[tokens + 1]`, and losses in nats `[tokens]`.

    The first id is only read.
    """
    shown, names = np.asarray(ids[:_TOKENS_SHOWN]), getattr(tokenizer, "special_tokens", {})
    tokens = read_tokens(shown, tokenizer.decode, names)
    nats = [None, *losses.tolist()]
    pieces = np.array_split(np.arange(len(losses)), min(_BARS, len(losses)))
    means = [(piece[0] + 1, piece[-1] + 1, float(losses[piece].mean())) for piece in pieces]
    return render_page(
        "pages/score.html.jinja",
        title=f"Loss of each token of {printable(name)}",
        scores=scores,
        tokens=[token._replace(nats=loss) for token, loss in zip(tokens, nats, strict=False)],
        # The full color is that of the largest losses, of which some tokens have more.
        full=max(float(np.percentile(losses, 98)), 1e-6),
        bars=[(f"tokens {first} to {last}: {mean:.4g} nats", mean) for first, last, mean in means],
    )
