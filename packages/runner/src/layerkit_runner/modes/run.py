"""What `runner` does once the command line is understood: one function per mode."""

from __future__ import annotations

import contextlib
import errno
import functools
import re
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from layerkit.diagnostics import layer_of
from layerkit.nested_map import MissingKeyError
from layerkit_runner.config.config_tree import walk
from layerkit_runner.config.field_paths import override_path
from layerkit_runner.config.flags import RunOptions
from layerkit_runner.config.resolve import ResolvedExperiment
from layerkit_runner.errors import (
    StorageError,
    UsageError,
    to_usage_error,
    unknown_name_text,
)
from layerkit_runner.files.atomic_write import open_append
from layerkit_runner.files.byte_sizes import size_text

if TYPE_CHECKING:
    from layerkit_runner.distributed.cluster import JoinedProcess

_FULL_OR_READ_ONLY = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)

# Other things than memory run out as well, such as the size of a message between processes.
_OUT_OF_MEMORY = (
    re.compile(r"(ran )?out of memory", re.IGNORECASE),
    re.compile(r"RESOURCE_EXHAUSTED: [^\n]*(memory|allocat)", re.IGNORECASE),
)
_BYTES = re.compile(r"\b(\d+) bytes")


class OutOfMemoryError(UsageError):
    """Devices or hosts hold less than a run needs, which nobody could know before: exit code 1."""

    exit_code = 1


def run(mode: str, resolved: ResolvedExperiment, options: RunOptions) -> int:
    """Runs one job and returns its exit code.

    Each mode imports what it needs, so that none waits for what only another one uses.
    """
    if options.job_log_dir is None:
        raise UsageError(f"--mode={mode} needs --job_log_dir=DIR")
    from layerkit_runner.distributed.cluster import joined
    from layerkit_runner.distributed.devices import (
        check_no_automatic_profile,
        set_compiler_flags,
        set_gpu_memory_share,
    )

    if mode == "train":
        check_no_automatic_profile()
    set_compiler_flags(options)
    set_gpu_memory_share()
    run_mode = _mode_function(mode)
    with (
        joined(options) as process,
        _watched(process, mode, options.hung_step_timeout_secs),
        layer_errors(resolved, process),
        _in_one_sentence(mode, resolved, process),
    ):
        return run_mode(resolved, options)


def _mode_function(mode: str) -> Callable[[ResolvedExperiment, RunOptions], int]:
    """Import the module of a mode, and of no other mode; return the function that runs it."""
    if mode == "train":
        from layerkit_runner.modes.train import run_train

        return run_train
    if mode == "export":
        from layerkit_runner.modes.export import run_export

        return run_export
    from layerkit_runner.modes.inference import run_inference

    return functools.partial(run_inference, mode)


@contextlib.contextmanager
def layer_errors(
    resolved: ResolvedExperiment, process: JoinedProcess | None = None
) -> Iterator[None]:
    """Raise UsageError for batches with which a layer cannot be traced, and for unknown names.

    Args:
      resolved: The experiment.
      process: The process in whose log the traceback is kept; None keeps it nowhere.
    """
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        text = unknown_name_text(error)
        if text is None:
            is_of_batch = isinstance(error, (TypeError, ValueError, MissingKeyError))
            if not is_of_batch or layer_of(error) is None:
                raise
        found = to_usage_error(error, owner=resolved.name)
        if text is not None:
            found.problem = text
        if process is not None:
            kept = _kept_traceback(error, process).strip()
            found.hint = " ".join(part for part in (found.hint, kept) if part)
        raise found from error


@contextlib.contextmanager
def _in_one_sentence(
    mode: str, resolved: ResolvedExperiment, process: JoinedProcess
) -> Iterator[None]:
    """Makes of errors that a person can do something about what the command line prints."""
    import jax

    from layerkit.layers.attention.backends import BackendRefusal
    from layerkit_runner import checkpointing

    try:
        yield
    except (
        BackendRefusal,
        checkpointing.LayoutVersionError,
        checkpointing.NewerManifestError,
        checkpointing.ProcessCountError,
    ) as error:
        raise UsageError(f"{resolved.name}: {error}") from error
    except OSError as error:
        if isinstance(error, checkpointing.SaveError) or error.errno in _FULL_OR_READ_ONLY:
            raise StorageError(str(error)) from error
        raise
    except jax.errors.JaxRuntimeError as error:
        words = memory_words(str(error))
        if words is None:
            raise
        raise OutOfMemoryError(
            f"{resolved.name} ran out of memory: {words}."
            f"{memory_remedies(mode, resolved)}{_kept_traceback(error, process)}"
        ) from error
    except MemoryError as error:
        # NumPy says how much it was asked for, Python nothing.
        words = str(error).rstrip(".") or "Python could not allocate what it needed"
        raise OutOfMemoryError(
            f"{resolved.name} ran out of memory of the host, not of a device: {words}."
            f"{_kept_traceback(error, process)}"
        ) from error


def memory_words(text: str) -> str | None:
    """What a compiler or a device says of memory that it does not have, in one line.

    Returns None if the text is about something else.
    """
    match = next((found for words in _OUT_OF_MEMORY if (found := words.search(text))), None)
    if match is None:
        return None
    line = text[match.start() :].partition("\n")[0]
    line = _BYTES.sub(lambda found: f"{found[0]} ({size_text(int(found[1]))})", line)
    return textwrap.shorten(line, 200, placeholder=" …").rstrip(".")


def memory_remedies(mode: str, resolved: ResolvedExperiment) -> str:
    """Return the overrides with which a run needs less memory; the text starts with a space."""
    paths = {
        path.rpartition(".")[2]: path
        for root in ("task", "datasets", "partitioner")
        for path, value in walk(getattr(resolved, root), root)
        if value is not None or root == "partitioner"
    }
    is_training = mode == "train"
    remedies = [
        words.format(f"--fdl.{override_path(resolved, paths[name])}")
        for name, words, applies in (
            ("percore_batch_size", "a smaller {}", True),
            ("batch_size", "a smaller {}", True),
            ("checkpoint_policy", "a {} that keeps less", is_training),
            ("ici_mesh_shape", "a {} with more fsdp", True),
        )
        if applies and name in paths
    ]
    text = f" What takes less: {', '.join(remedies)}." if remedies else ""
    if is_training:
        text += (
            f" What fits, without the devices: runner --exp={resolved.name} --mode=plan --search,"
            " with the same --fdl flags."
        )
    return text


def _kept_traceback(error: BaseException, process: JoinedProcess) -> str:
    """Append the whole error to the process's log, or else print it; return where it is."""
    from layerkit_runner.distributed.forced_exit import SECONDS_TO_WRITE, finished_within

    text = "".join(traceback.format_exception(error))
    logs: list[Path] = []

    def append() -> None:
        log = process.log_file()
        with open_append(log) as file:
            file.write(text.encode())
        logs.append(log)

    if not finished_within(SECONDS_TO_WRITE, append):
        print(text, end="", file=sys.stderr)
        return ""
    return f" The whole error is in {logs[0]}."


def _watched(
    process: JoinedProcess, mode: str, hung_step_timeout_secs: float | None
) -> contextlib.AbstractContextManager[None]:
    from layerkit_runner.distributed.watchdog import watched

    # An export is a few long strokes, which say nothing in between.
    seconds = None if mode == "export" else hung_step_timeout_secs
    return watched(
        seconds,
        process=str(process.identity),
        log=process.log_file,
    )
