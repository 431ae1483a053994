"""Errors of inputs: records that cannot be read, missing dependencies, and whose error it is.

A record that is silently dropped harms a run as much as wrong data. So by default a reader raises
for a record that it cannot read, and names the file and the record. With `on_bad_record="skip"` it
counts such records instead and keeps the problems of the first ones for reports.

An optional dependency is imported when a reader that needs it is built. If it is missing, the error
message has the command that installs it. This module loads neither NumPy nor JAX.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from layerkit.errors import ConfigError, UserError, hub_hint, pip_install

_ATTRIBUTE = "layerkit_input"
# Importable name -> extra of layerkit-inputs that installs it.
_EXTRA_OF = {
    "PIL": "vision",
    "array_record": "grain",
    "datasets": "hf",
    "grain": "grain",
    "jinja2": "chat",
    "pyarrow": "grain",
    "sacrebleu": "bleu",
    "soundfile": "audio",
    "sentencepiece": "text",
    "seqio": "seqio",
    "tensorflow": "seqio",
    "tensorflow_datasets": "seqio",
    "tokenizers": "hf",
}


class naming_input:  # noqa: N801
    """A context that records the label of an input, such as `LocalText 'train'`, in its errors.

    StopIteration is no error.

    A `UserError` without an owner gets the label as its owner. Errors of values and files keep
    their text, and reports add the label by `input_of`. Other errors get a note, which tracebacks
    show. Each batch passes several of these contexts, so they are no generators.
    """

    def __init__(self, label: str) -> None:
        """Store the label."""
        self._label = label

    def __enter__(self) -> None:
        """Enter the context."""

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        """Record the label in the error of the block, unless it has that of a source."""
        if not isinstance(error, Exception) or isinstance(error, StopIteration):
            return
        if input_of(error) is None:
            setattr(error, _ATTRIBUTE, self._label)
            if isinstance(error, UserError):
                error.owner = error.owner or self._label
            elif not isinstance(error, (OSError, ValueError)):
                error.add_note(f"In input {self._label}")


def input_of(error: BaseException) -> str | None:
    """Return the label of the input that raised an error, such as `LocalText 'train'`."""
    return getattr(error, _ATTRIBUTE, None)


def is_storage_failure(error: BaseException) -> bool:
    """Return True for an error of the operating system, such as that of a lost file server.

    Readers raise an `OSError` without a number for damaged content.
    """
    return isinstance(error, OSError) and error.errno is not None


def first_line(error: Exception) -> str:
    """Return the first line of the message of an error, or the name of its class."""
    message = str(getattr(error, "message", None) or error)
    return (message.strip().splitlines() or [type(error).__name__])[0]


class MissingExtraError(UserError, ImportError):
    """An optional dependency that is not installed."""


def require_extra(module: str, *, needed_by: str) -> ModuleType:
    """Import and return a module that an extra of layerkit-inputs installs.

    Args:
      module: Dotted name, such as `grain.sources`.
      needed_by: Class or feature that needs the module, for the message.

    Raises:
      MissingExtraError: The module is not installed. The message has the command to install it.
    """
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        # A missing module inside an installed package is a different error.
        if error.name is None or error.name.partition(".")[0] != package:
            raise
    hint = f"Install it: {pip_install('layerkit-inputs', _EXTRA_OF[package])}"
    raise MissingExtraError(f"{needed_by} needs the package {package}", hint=hint)


OnBadRecord = Literal["refuse", "skip"]
"""Policy for records that a reader cannot read: `refuse` raises, `skip` counts."""

_MAX_KEPT = 8
CONVERSATIONS = (
    "Conversations are read by ChatInput, as in the experiment lm.sft.Chat (docs/chat.md)."
)
"""Hint for a field of messages with roles, which readers of text do not read."""


class MissingFileError(UserError, FileNotFoundError):
    """A file or folder that does not exist."""


class BadRecordError(ConfigError):
    """A record that cannot be read. Its owner is the file, with the number of the record."""


@contextlib.contextmanager
def as_bad_record(owner: str, problem: str, *kinds: type[Exception]) -> Iterator[None]:
    """Raise errors of some kinds as `BadRecordError`, but not failures of the storage.

    Args:
      owner: File, with the number of the record.
      problem: Problem of the record, which the text of the error follows in parentheses.
      *kinds: Classes of the errors that damaged content causes.
    """
    try:
        yield
    except kinds as error:
        if isinstance(error, BadRecordError) or is_storage_failure(error):
            raise
        text = str(error).rstrip(".") or type(error).__name__
        raise BadRecordError(f"{problem} ({text})", owner=owner) from None


@dataclasses.dataclass
class BadRecords:
    """The policy for bad records, and the count of skipped ones.

    Attributes:
      policy: `refuse` or `skip`.
      num_skipped: Number of records that were skipped.
      first: Problems of the first skipped records.
    """

    policy: OnBadRecord = "refuse"
    num_skipped: int = 0
    first: list[str] = dataclasses.field(default_factory=list)

    def report(self, *, file: str, record: int | None, problem: str) -> None:
        """Count a record that cannot be read, or raise.

        Args:
          file: File that holds the record.
          record: Zero-based number of the record in the file, or None if the whole file cannot be
            read.
          problem: Sentence that describes what is wrong with the record.

        Raises:
          BadRecordError: The policy is `refuse`.
        """
        where = file if record is None else f"{file}, record {record}"
        if self.policy == "refuse":
            hint = "Set on_bad_record='skip' to skip and count such records."
            raise BadRecordError(problem, owner=where, hint=hint)
        self.num_skipped += 1
        if len(self.first) < _MAX_KEPT:
            self.first.append(f"{where}: {problem}")


def missing_file(tokenizer: Any, path: str) -> MissingFileError:
    """Return the error about a file of a tokenizer that does not exist."""
    folder = Path(path).parent
    problem, choices = f"no such folder: {folder}", []
    if folder.is_dir():
        files = [str(file) for file in folder.iterdir() if file.suffix in (".model", ".json")]
        problem, choices = "file not found", ["bytes", *sorted(files)]
    return MissingFileError(
        problem,
        owner=type(tokenizer).__qualname__,
        field="path",
        value=path,
        expected="'bytes', or the path of a .model file, of a tokenizer.json, or of its folder",
        choices=choices,
        hint=hub_hint(path),
    )


def unreadable_file(
    tokenizer: Any, path: str | Path, expected: str, error: Exception
) -> BadRecordError:
    """Return the error about a file of a tokenizer that cannot be read."""
    problem = str(error).strip().splitlines()[-1:] or [type(error).__name__]
    return BadRecordError(
        f"cannot read the file ({problem[0]})",
        owner=type(tokenizer).__qualname__,
        field="path",
        value=str(path),
        expected=expected,
    )


def check_same_data(
    owner: str, then: dict[str, Any], now: dict[str, Any], *, field: str = "state.data"
) -> None:
    """Raise `ConfigError` unless a state was written by a reader of the same data.

    Args:
      owner: Name of the reader.
      then: JSON values that identify the data of the state, by name.
      now: JSON values that identify the data of the reader, by name.
      field: Name of these values in the message.

    Raises:
      ConfigError: Data differ. `value` holds those of the state that differ.
    """
    differing = [name for name in sorted({*then, *now}) if then.get(name) != now.get(name)]
    if differing:
        raise ConfigError(
            "cannot restore",
            owner=owner,
            field=field,
            value={name: then.get(name) for name in differing},
            expected=str({name: now.get(name) for name in differing}),
            hint="Use the same data, fields, hosts and version, or only the weights.",
        )
