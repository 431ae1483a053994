"""`--mode=generate`: continue prompts with a trained model, and print each token at once.

Without `--prompt`, the standard input is the prompt. On a terminal, a dialog asks for prompts. The
seed is increased by the number of times that a prompt was continued before, so that its sample does
not depend on the other prompts. With `--chat`, each prompt, or line of the standard input, is a
message of the user in one conversation.
"""

from __future__ import annotations

import collections
import contextlib
import importlib
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from layerkit.config.checks import require
from layerkit_runner.config.flags import configure_library_logs
from layerkit_runner.config.requests import ParsedFlags
from layerkit_runner.errors import UsageError
from layerkit_runner.files.text import check_utf8
from layerkit_runner.run_options import RunOptions

if TYPE_CHECKING:
    from layerkit_runner.run.model.loaded_model import LoadedModel

_MARK = ">>> "


def run_generate(flags: ParsedFlags) -> int:
    """Load the model of a folder and continue prompts; return the exit code."""
    options = flags.options
    prompts, asks = options.prompt or (), False
    if not prompts:
        asks = sys.stdin.isatty()
        # Read before the model is loaded, so that a missing prompt is reported at once.
        prompts = () if asks else _piped_prompt()
        if options.chat and prompts:
            prompts = tuple(filter(None, prompts[0].splitlines()))
    model = _load(flags)
    if asks:
        hint = "Ctrl-C stops a continuation, Ctrl-D ends."
        print(f"{model}\n{hint}", file=sys.stderr, flush=True)
    if options.chat:
        return _chat(model, options, _lines() if asks else prompts)
    if asks:
        return _ask(model, options)
    for index, prompt in enumerate(prompts):
        if len(prompts) > 1:
            print(_MARK + prompt, flush=True)
        _continue(model, prompt, options, seed=(options.seed or 0) + prompts[:index].count(prompt))
    return 0


def _load(flags: ParsedFlags) -> LoadedModel:
    from layerkit_runner.distributed.devices import enable_compilation_cache, set_gpu_memory_share
    from layerkit_runner.interface.loading import load_folder

    options = flags.options
    is_valid = (options.job_log_dir is None) != (options.init_from is None)
    expected = "the folder of a job, or --init_from with a Hugging Face folder in its place"
    require(is_valid, None, "--job_log_dir", options.job_log_dir, expected, UsageError)
    configure_library_logs(options)
    set_gpu_memory_share()
    enable_compilation_cache(options.jax_compilation_cache)
    return load_folder(
        options.job_log_dir or options.init_from or "",
        step=options.only_restore_step,
        experiment=flags.exp,
        overrides=flags.overrides,
    )


def _piped_prompt() -> tuple[str, ...]:
    try:
        text = sys.stdin.read().removesuffix("\n")  # which `echo` and editors add
    except UnicodeDecodeError as error:
        text = error.object.decode("utf-8", "surrogateescape")
    if not text:
        raise UsageError(field="--prompt", value=None, expected="a text to continue")
    check_utf8(text, field="standard input")
    return (text,)


def _continue(model: LoadedModel, prompt: str, options: RunOptions, *, seed: int) -> None:
    """Print the continuation of a prompt while it is made, and a line end."""
    model.generate(prompt, **_options(options, seed), stream=lambda _, piece: _write(piece))
    print(flush=True)


def _options(options: RunOptions, seed: int) -> dict[str, Any]:
    names = ("max_new_tokens", "temperature", "top_k", "top_p")
    return {**{name: getattr(options, name) for name in names}, "seed": seed}


def _write(piece: str) -> None:
    print(piece, end="", flush=True)


def _chat(model: LoadedModel, options: RunOptions, lines: Iterable[str]) -> int:
    """Answer the lines of a conversation; Ctrl-C discards a line and its answer."""
    messages: list[dict[str, Any]] = []
    for line in lines:
        turn = [*messages, {"role": "user", "content": line}]
        try:
            answer = model.chat(turn, **_options(options, options.seed or 0), stream=_write)
            messages = [*turn, {"role": "assistant", "content": answer}]
        except KeyboardInterrupt:
            pass
        print(flush=True)
    return 0


def _ask(model: LoadedModel, options: RunOptions) -> int:
    """Continue the lines that a person types; Ctrl-C stops a continuation, Ctrl-D ends."""
    asked = collections.Counter[str]()
    for prompt in _lines():
        try:
            _continue(model, prompt, options, seed=(options.seed or 0) + asked[prompt])
        except KeyboardInterrupt:
            print(flush=True)
        asked[prompt] += 1
    return 0


def _lines() -> Iterator[str]:
    """Yield the lines that are typed, without empty ones."""
    with contextlib.suppress(ImportError):
        importlib.import_module("readline")  # gives `input` a history
    while True:
        try:
            line = input(_MARK)
        except EOFError:
            print(flush=True)
            return
        except KeyboardInterrupt:
            print(flush=True)
            continue
        except UnicodeDecodeError:
            print("the line is not UTF-8", file=sys.stderr, flush=True)
            continue
        if line:
            yield line
