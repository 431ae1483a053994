"""Errors about what a user wrote: configuration fields, arguments and files, as data.

`UserError` carries the field, its value and what was expected, and `render` makes the message of
all of them, so that programs and tests read attributes instead of sentences:

    UserError                  base of all; raised by no code directly
    ├── ConfigError            also a ValueError: a wrong field of a layer, input or function
    │   └── UnknownNameError   also an AttributeError: a name that does not exist
    │       └── UnknownFieldError   also a TypeError: a field that a class does not have
    └── layerkit_runner's UsageError   a request that the command line refuses

`near_names` and `find_near_names` suggest valid names for an unknown one. `naming_layer` and
`layer_of` tell in which layer an error of any class was raised.

This module imports nothing that takes time, so that command lines and data workers can use it.
"""

from __future__ import annotations

import difflib
import enum
import functools
import json
import os
import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from typing import Any

_MAX_VALUE_LENGTH = 100
_MAX_CHOICES = 12

_NOTE = "In layer "
# The owner of a UserError, or the start of the text of another error: "Linear(lm/softmax).w: …".
_LAYER = re.compile(r"\w+\([\w/]*\)(?=[.:]|$)")


class _Missing(enum.Enum):
    MISSING = enum.auto()


MISSING = _Missing.MISSING


class UserError(Exception):
    """An error about something that a user wrote, as data.

    The attributes may be completed by a caller that knows more, such as the path of the config that
    holds a field: `error.owner = "task"`, then `raise`.

    Attributes:
      problem: Failed operation, such as "cannot restore". Empty if the field and `expected` say it.
      owner: Owner of the field: the layer `Linear(lm/softmax)`, an input, a class or a file.
      field: Name or path of the field, such as `task.train.num_train_steps`.
      value: The value of the field; `MISSING` if the error is about no value.
      expected: Noun phrase that describes valid values, such as "a positive integer".
      choices: Valid values or names. The message names the nearest ones and, unless there are more
        than 12, lists them.
      hint: Remedy, as one or more sentences or a command.
      settings: Values that together resolve the error, by configuration path or by name of a field.
        The text "…" stands for a value that the user has to choose.
    """

    def __init__(
        self,
        problem: str = "",
        *,
        owner: str | None = None,
        field: str | None = None,
        value: Any = MISSING,
        expected: str | None = None,
        choices: Iterable[Any] = (),
        hint: str | None = None,
        settings: Mapping[str, Any] | None = None,
    ):
        """Store the data; see the attributes of the class."""
        super().__init__(problem)
        self.problem = problem
        self.owner = owner
        self.field = field
        self.value = value
        self.expected = expected
        self.choices = tuple(choices)
        self.hint = hint
        self.settings = dict(settings or {})

    def __str__(self) -> str:
        """Return the rendered message."""
        return render(self)

    def __reduce__(self) -> Any:
        """Return the pickled form with all attributes, which pickle would lose."""
        return (type(self), (self.problem,), self.__dict__)


class ConfigError(UserError, ValueError):
    """A field, argument or input that a layer, data set or function cannot use."""


class UnknownNameError(ConfigError, AttributeError):
    """A name that a layer, a map or a module does not have. `choices` are the names that it has."""


class UnknownFieldError(UnknownNameError, TypeError):
    """A field that a class does not have; the message suggests the nearest names."""


def pip_install(distribution: str, extra: str) -> str:
    """Return the command that installs what an extra of an installed distribution requires.

    It names the required packages, because an index may not have the distribution itself.
    """
    from importlib.metadata import requires

    marker = f"extra == '{extra}'"
    rows = [row.partition("; ") for row in requires(distribution) or ()]
    return shlex.join(["pip", "install", *(name for name, _, when in rows if when == marker)])


# An id of a repository, as `hf download` takes it. Old ids of models have no owner: gpt2.
_HUB_ID = re.compile(
    r"(?:hf://|https?://huggingface\.co/)?(?:datasets/)?"
    r"(?P<id>[\w-][\w.-]*/\w[\w.-]*|[a-z]+[-\d][\w.-]*)/?"
)
_FILE_SUFFIX = re.compile(r"\.(?:txt|md|py|csv|gz|jsonl?|parquet|model|safetensors|gguf)$")


def hub_hint(path: str, *, is_data: bool = False) -> str | None:
    """Return how to download a missing path that may be an id of the Hugging Face Hub, or None.

    Args:
      path: Path that does not exist, as the user wrote it.
      is_data: True for a data set, False for a model.
    """
    match = _HUB_ID.fullmatch(path)
    if match is None or _FILE_SUFFIX.search(path) or (is_data and "/" not in match["id"]):
        return None
    owner, _, name = match["id"].rpartition("/")
    if owner and os.path.isdir(owner):  # a path of this machine
        return None
    kind, option = ("data set", "--repo-type dataset ") if is_data else ("model", "")
    return (
        f"If {match['id']} is a {kind} of the Hugging Face Hub, download it by"
        f" `hf download {option}{match['id']} --local-dir {name}` and give its folder."
    )


def render(error: UserError) -> str:
    """Return the message: `owner: problem: field=value. Expected …. Did you mean …? hint Set …`."""
    subject = error.field or ""
    if error.value is not MISSING:
        value = short_repr(error.value)
        subject = f"{subject}={value}" if subject else value
    sentences = [": ".join(part for part in (error.owner, error.problem, subject) if part)]
    if not (error.expected or error.choices or error.hint or error.settings):
        return sentences[0]
    if error.expected:
        sentences.append(f"Expected {error.expected}")
    if error.choices:
        sentences.append(_choice_sentence(error))
    text = " ".join(as_sentence(sentence) for sentence in sentences if sentence)
    if error.hint:
        # As it stands, since it may end with a command.
        text = f"{text} {error.hint}"
    return f"{text} Set {setting_words(error.settings)}" if error.settings else text


def _choice_sentence(error: UserError) -> str:
    choices = list(dict.fromkeys(map(str, error.choices)))
    listed = f"Choices: {first_names(choices)}"
    near = find_near_names(error.value, choices) if isinstance(error.value, str) else []
    if not near:
        return listed
    suggestion = f"Did you mean {' or '.join(map(repr, near))}?"
    # Of many choices, the nearest ones are enough.
    needs_no_list = len(choices) > _MAX_CHOICES or len(near) == len(choices)
    return suggestion if needs_no_list else f"{suggestion} {listed}"


def setting_words(settings: Mapping[str, Any]) -> str:
    """Return `name=value` of each setting as words of a shell."""
    # JSON without spaces, so that a shell reads each setting as one word.
    texts = {
        name: json.dumps(value, separators=(",", ":")) if isinstance(value, list) else str(value)
        for name, value in settings.items()
    }
    return " ".join(
        f"{name}={text if text == '…' else shlex.quote(text)}" for name, text in texts.items()
    )


def short_repr(value: Any) -> str:
    """Return the `repr` of a value in one line, cut after 100 characters."""
    text = " ".join(repr(value).split())
    return text if len(text) <= _MAX_VALUE_LENGTH else f"{text[:_MAX_VALUE_LENGTH]}…"


def first_names(names: Iterable[str], *, limit: int = _MAX_CHOICES) -> str:
    """Return names as a list for an error message, at most `limit` of them."""
    names = list(names)
    more = f", … ({len(names) - limit} more)" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def error_text(error: BaseException) -> str:
    """Return the text of any error; if its class cannot make the text, name the class."""
    try:
        return str(error)
    except Exception as problem:
        return f"{type(error).__name__} whose text raises {type(problem).__name__}"


def as_sentence(text: str) -> str:
    """Return a text with a full stop, unless it ends a sentence already."""
    return text if text.endswith((".", "?", "!")) else f"{text}."


def find_near_names(name: str, valid: Iterable[str]) -> list[str]:
    """Return the valid names, at most two, that are similar to an unknown name.

    Case, leading dashes, and the difference between dashes and underscores are ignored, and so is a
    folder that all names share, which would make any two paths similar. Initials, such as `lr`, are
    similar to the whole name.

    Args:
      name: Unknown name.
      valid: Names that exist.
    """
    valid = list(valid)
    folder = name[: name.rfind("/") + 1]
    if not all(candidate.startswith(folder) for candidate in valid):
        folder = ""
    folded = {_fold(candidate.removeprefix(folder)): candidate for candidate in valid}
    target = _fold(name.removeprefix(folder))
    abbreviated = [c for f, c in folded.items() if "".join(w[:1] for w in f.split("_")) == target]
    if target not in folded and len(target) > 1 and abbreviated:
        return abbreviated[:2]
    matches = difflib.get_close_matches(target, folded, n=2, cutoff=0.6)
    # Suggest a second name only if it is about as similar as the first.
    ratios = [difflib.SequenceMatcher(None, match, target).ratio() for match in matches]
    return [folded[m] for m, ratio in zip(matches, ratios, strict=True) if ratio > ratios[0] - 0.1]


def near_names(name: str, valid: Iterable[str]) -> str:
    """Return the end of a sentence about an unknown name, `"; did you mean 'x'?"`, or `""`."""
    near = find_near_names(name, valid)
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""


def _fold(name: str) -> str:
    return name.lower().lstrip("-").replace("-", "_")


def naming_layer(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method of a layer so that errors name the innermost layer.

    A `UserError` without owner gets the layer as its owner, any other error gets a note.
    """

    @functools.wraps(method)
    def named(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            if isinstance(error, UserError) and error.owner is None:
                error.owner = self.path_name
            elif layer_of(error) is None:
                error.add_note(f"{_NOTE}{self.path_name}")
            raise

    return named


def layer_of(error: BaseException) -> str | None:
    """Return the class and path of the layer that raised an error, or None if no layer did."""
    text = error.owner or "" if isinstance(error, UserError) else error_text(error)
    if named := _LAYER.match(text):
        return named[0]
    for note in getattr(error, "__notes__", ()):
        if note.startswith(_NOTE):
            return str(note.removeprefix(_NOTE))
    return None
