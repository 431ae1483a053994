"""Chat templates: the text of a conversation for a model, as `transformers` renders it.

A template is Jinja. It is rendered in Jinja's immutable sandbox, so the file of a downloaded folder
can neither run code nor read files. `{% generation %}` blocks, which mark what the assistant
writes, are read as in `transformers`.

`load_chat_template` reads the template of a tokenizer's folder, a file, or one of `NAMED`.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import importlib
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from layerkit.config.checks import check_choice
from layerkit.errors import hub_hint
from layerkit_inputs.base.errors import BadRecordError, MissingFileError, require_extra
from layerkit_inputs.base.tokenizer_interface import ROLES, Tokenizer
from layerkit_inputs.chat.conversations import Message

_NO_TOOLS = (
    "{%- if tools or message.tool_calls -%}"
    "{{ raise_exception('This template has no tools; choose that of a model that calls tools.') }}"
    "{%- endif -%}"
)
NAMED = {
    "chatml": (
        "{%- for message in messages -%}"
        + _NO_TOOLS
        + "{{- '<|im_start|>' + message.role + '\\n' -}}"
        "{%- if message.role == 'assistant' -%}"
        "{%- generation -%}{{- message.content + '<|im_end|>\\n' -}}{%- endgeneration -%}"
        "{%- else -%}{{- message.content + '<|im_end|>\\n' -}}{%- endif -%}"
        "{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
    ),
    "zephyr": (
        "{%- for message in messages -%}" + _NO_TOOLS + "{{- '<|' + message.role + '|>\\n' -}}"
        "{%- if message.role == 'assistant' -%}"
        "{%- generation -%}{{- message.content + eos_token + '\\n' -}}{%- endgeneration -%}"
        "{%- else -%}{{- message.content + eos_token + '\\n' -}}{%- endif -%}"
        "{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '<|assistant|>\\n' -}}{%- endif -%}"
    ),
}
"""Templates by name. `zephyr` ends each turn with the tokenizer's EOS, so it also fits bytes."""
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
_ERRORS_OF_DATA = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError)
# Context variable of the characters that mark a generation block, and places of splits.
_MARKS = "conversation_marks"
_PRIVATE_USE = range(0xF0000, 0xFFFFE)


class Rendering(NamedTuple):
    """The text of a conversation, and places in it, in characters."""

    text: str
    generated: list[tuple[int, int]]
    """Begin and end of each `{% generation %}` block, in the order in which they end."""
    splits: list[int]
    """Places at which the text must be split before it is encoded."""


SplitText = Callable[[str, str | None, str], str]
"""Function of a mark, the role of a message (None for tools), and a text of it. It returns the text
with the mark at each place where it must be split before it is encoded."""


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """A chat template with its variables.

    Attributes:
      sources: Jinja of the template `default` and of variants, such as `tool_use`, by name.
      variables: Variables of the template, such as `{"bos_token": "<s>"}`.
      today: Time that `strftime_now` formats. None: that of the call, so tokens change by the day.
    """

    sources: Mapping[str, str]
    variables: Mapping[str, Any]
    today: datetime.datetime | None = None

    def source(self, tools: Any) -> str:
        """Return the Jinja that renders a conversation with these tools, or with None."""
        name = "tool_use" if tools is not None and "tool_use" in self.sources else "default"
        check_choice("ChatTemplate", self.sources, chat_template=name)
        return self.sources[name]

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
    ) -> str:
        """Return the text of a conversation, as `apply_chat_template` of `transformers`.

        Args:
          messages: Messages, at least one. Their `train` flags are not rendered.
          tools: JSON schemas of the tools, or None.
          add_generation_prompt: Whether the text ends where an answer of the assistant begins.

        Raises:
          BadRecordError: The template cannot render the messages.
        """
        return self._render(messages, tools, marks="", add_generation_prompt=add_generation_prompt)

    def locate(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        split_text: SplitText = lambda mark, role, text: text,
    ) -> Rendering:
        """Return the text of a conversation with the places of generated text and of splits.

        Args:
          messages: As in `render`.
          tools: As in `render`.
          add_generation_prompt: As in `render`.
          split_text: Function that splits the texts of messages and tools.

        Raises:
          BadRecordError: The template cannot render the messages, or reads the split texts.
        """
        data = json.dumps([messages, tools], ensure_ascii=False, default=str)
        unused = (char for char in map(chr, _PRIVATE_USE) if char not in data)
        marks = "".join(itertools.islice(unused, 3))
        split = [
            _map_texts(value, functools.partial(split_text, marks[2], role))
            for value, role in [
                *((message, message["role"]) for message in messages),
                (tools, None),
            ]
        ]
        options = {"add_generation_prompt": add_generation_prompt}
        marked = self._render(split[:-1], split[-1], marks=marks, **options)
        pieces = re.split(f"([{marks}])", marked)
        ends = [*itertools.accumulate(map(len, pieces[::2]))]
        begins: list[int] = []
        places = Rendering("".join(pieces[::2]), [], [])
        for mark, place in zip(pieces[1::2], ends, strict=False):
            if mark == marks[0]:
                begins.append(place)
            elif mark == marks[1]:
                places.generated.append((begins.pop(), place))
            else:
                places.splits.append(place)
        if places.splits and places.text != self._render(messages, tools, marks="", **options):
            raise BadRecordError(
                "the chat template handles the special tokens that a message spells out",
                hint="Remove them from the message, or set special_tokens_in_text='ids'.",
            )
        return places

    def _render(self, messages: Any, tools: Any, *, marks: str, **options: bool) -> str:
        jinja2 = require_extra("jinja2", needed_by="a chat template")
        now = self.today or datetime.datetime.now()
        variables = {"strftime_now": now.strftime, **self.variables, _MARKS: marks}
        try:
            return _compile(self.source(tools)).render(
                messages=[_with_reasoning(message) for message in messages],
                tools=tools,
                documents=None,
                **options,
                **variables,
            )
        except (jinja2.TemplateError, *_ERRORS_OF_DATA) as error:
            raise BadRecordError(
                f"the chat template cannot render the messages ({error})"
            ) from None


def load_chat_template(
    name: str | None,
    tokenizer: Tokenizer,
    *,
    variables: Mapping[str, Any] | None = None,
    today: datetime.datetime | None = None,
) -> ChatTemplate:
    """Return a chat template for a tokenizer.

    Args:
      name: One of `NAMED`, the name of a variant in the tokenizer's folder, or the path of a
        `.jinja` file or of a folder. None: the template of the tokenizer's folder.
      tokenizer: The tokenizer, whose special tokens the template writes.
      variables: More variables of the template, such as `{"enable_thinking": False}`.
      today: See `ChatTemplate`.

    Raises:
      ConfigError: There is no such template, or the tokenizer encodes special tokens as text.
      BadRecordError: A file cannot be read, or is not a Jinja template.
    """
    encoding = getattr(tokenizer, "special_tokens_in_text", "ids")
    check_choice(type(tokenizer).__qualname__, ["ids"], special_tokens_in_text=encoding)
    folder = Path(getattr(tokenizer, "path", "")).parent if hasattr(tokenizer, "path") else None
    sources = _read_sources(folder) if folder else {}
    if name is not None and name in {**NAMED, **sources}:
        sources = {"default": sources.get(name) or NAMED[name]}
    elif name is not None:
        sources = _read_sources(Path(name))
    if not sources:
        raise MissingFileError(
            "no chat template",
            field="chat_template",
            value=name,
            expected="a folder with a chat template, a .jinja file, or a name",
            choices=NAMED,
            hint=hub_hint(name or ""),
        )
    for source in sources.values():
        _compile(source)
    return ChatTemplate(sources, {**_named_tokens(tokenizer), **(variables or {})}, today)


def _read_sources(path: Path) -> dict[str, str]:
    """Return the templates of a folder by name, in the order of `transformers`, or of a file."""
    files = {"default": path} if path.is_file() else {}
    if path.is_dir():
        files = {"default": path / "chat_template.jinja"}
        files |= {file.stem: file for file in sorted(path.glob("chat_templates/*.jinja"))}
    sources = {name: file.read_text("utf-8") for name, file in files.items() if file.is_file()}
    config = path / "tokenizer_config.json"
    if sources or not config.is_file():
        return sources
    stored = json.loads(config.read_bytes()).get("chat_template") or {}
    if isinstance(stored, list):
        return {variant["name"]: variant["template"] for variant in stored}
    return {"default": stored} if isinstance(stored, str) else stored


def _named_tokens(tokenizer: Tokenizer) -> dict[str, str]:
    """Return the special tokens that a template may write, by role."""
    names = getattr(tokenizer, "special_tokens", {})
    ids = (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id)
    tokens = {role: names.get(token_id) for role, token_id in zip(ROLES, ids, strict=True)}
    tokens = getattr(tokenizer, "declared_tokens", tokens)
    return {role: token for role, token in tokens.items() if token is not None}


def _with_reasoning(message: Message) -> Message:
    """Return a message as a template reads it: reasoning under each name, no null, no `train`."""
    message = {key: value for key, value in message.items() if value is not None and key != "train"}
    reasoning = [message[name] for name in _REASONING_FIELDS if name in message]
    if reasoning:
        message = {"thinking": reasoning[0], **message, "reasoning_content": reasoning[0]}
    return message


def _map_texts(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _map_texts(item, change) for key, item in value.items()}
    return [_map_texts(item, change) for item in value] if isinstance(value, list) else value


@functools.lru_cache
def _compile(source: str) -> Any:
    """Return the compiled template in an environment as that of `transformers`."""
    jinja2 = require_extra("jinja2", needed_by="a chat template")
    ext, nodes, sandbox = map(
        importlib.import_module, ("jinja2.ext", "jinja2.nodes", "jinja2.sandbox")
    )
    extension: Any = ext.Extension
    namespace: Any = jinja2.utils.Namespace

    class Generation(extension):
        """The block `{% generation %}`, which puts marks around its text."""

        tags = frozenset({"generation"})

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            call = self.call_method("mark", [nodes.ContextReference()])
            return nodes.CallBlock(call, [], [], body).set_lineno(line)

        def mark(self, context: Any, caller: Callable[[], str]) -> str:
            marks = context[_MARKS]
            return f"{marks[:1]}{caller()}{marks[1:2]}"

    class Namespace(namespace):
        """A namespace whose attributes do not begin with an underscore."""

        def __setitem__(self, name: str, value: Any) -> None:
            if str(name).startswith("_"):
                raise jinja2.exceptions.SecurityError(f"namespace attribute {name!r}")
            super().__setitem__(name, value)

    def fail(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(
        value: Any,
        *,
        ensure_ascii: bool = False,
        indent: Any = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        options = {"indent": indent, "separators": separators, "sort_keys": sort_keys}
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals |= {"raise_exception": fail, "namespace": Namespace}
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        problem = f"the chat template is not Jinja (line {error.lineno}: {error})"
        raise BadRecordError(problem, field="chat_template") from None
