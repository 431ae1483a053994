"""Chat templates: the text of a conversation for a model, as `transformers` renders it.

A template is Jinja. It is rendered in Jinja's immutable sandbox, so that the file of a downloaded
folder can neither run code nor read files.
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
from layerkit_inputs.chat.conversations import IMAGE_MARKER, Message

_TURNS = (
    "{%- for message in messages -%}"
    "{%- if tools or message.tool_calls -%}{{ raise_exception('it has no tools') }}{%- endif -%}"
    "{%- set text -%}{%- if message.content is string -%}{{- message.content -}}"
    "{%- else -%}{%- for part in message.content -%}"
    f"{{{{- part.text if part.type == 'text' else '{IMAGE_MARKER}' -}}}}"
    "{%- endfor -%}{%- endif -%}{%- endset -%}"
    "{{- begin + message.role + middle -}}"
    "{%- if message.role == 'assistant' -%}"
    "{%- generation -%}{{- text + end + '\n' -}}{%- endgeneration -%}"
    "{%- else -%}{{- text + end + '\n' -}}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- begin + 'assistant' + middle -}}{%- endif -%}"
)
NAMED = {
    "chatml": "{%- set begin, middle, end = '<|im_start|>', '\n', '<|im_end|>' -%}" + _TURNS,
    "zephyr": "{%- set begin, middle, end = '<|', '|>\n', eos_token -%}" + _TURNS,
}
"""Templates by name. A turn of `zephyr` ends with the tokenizer's EOS, which bytes have too."""
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
# Variable of a template: characters around a generation block, and at a split.
_MARKS = "marks_of_places"
_PRIVATE_USE = range(0xF0000, 0xFFFFE)


class Rendering(NamedTuple):
    """The text of a conversation, with places in characters."""

    text: str
    generated: list[tuple[int, int]]
    """Begin and end of each `{% generation %}` block."""
    splits: list[int]
    """Where to split the text before it is encoded."""


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

    def render(self, messages: Sequence[Message], **options: Any) -> str:
        """Return the text of a conversation, as `apply_chat_template` of `transformers`.

        Args:
          messages: Messages, at least one. Their `train` flags are not rendered.
          **options: `tools` and `add_generation_prompt` of `locate`.

        Raises:
          BadRecordError: The template cannot render the messages.
        """
        return self.locate(messages, **options).text

    def locate(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        patterns: tuple[re.Pattern[str], re.Pattern[str]] | None = None,
    ) -> Rendering:
        """Return the text of a conversation, with the places of generation blocks and of splits.

        Args:
          messages: Messages, at least one.
          tools: JSON schemas of the tools, or None.
          add_generation_prompt: Whether the text ends where an answer of the assistant begins.
          patterns: Patterns of characters after which texts are split: those of messages of users
            and tools, and all others. None: no text is split.

        Raises:
          BadRecordError: The template cannot render the messages, or reads the split texts.
        """
        template = _compile(self.source(tools))
        data = json.dumps([messages, tools], ensure_ascii=False, default=str)
        unused = (char for char in map(chr, _PRIVATE_USE) if char not in data)
        begin, end, split = marks = [*itertools.islice(unused, 3)]
        turns, schemas = [_with_reasoning(message) for message in messages], tools
        if patterns is not None:
            outer, inner = patterns
            by_role: dict[Any, re.Pattern[str]] = {"user": outer, "tool": outer}
            turns = [_split(turn, by_role.get(turn.get("role"), inner), split) for turn in turns]
            schemas = _split(tools, inner, split)
        now = self.today or datetime.datetime.now()
        variables = {"strftime_now": now.strftime, _MARKS: marks, "documents": None}
        options = {"add_generation_prompt": add_generation_prompt}
        try:
            marked = template.render(
                variables | {**self.variables}, messages=turns, tools=schemas, **options
            )
        except Exception as error:  # A template may raise errors of any class.
            raise BadRecordError(f"the chat template cannot render the messages: {error}") from None
        pieces = re.split(f"([{''.join(marks)}])", marked)
        text, ends = "".join(pieces[::2]), itertools.accumulate(map(len, pieces[::2]))
        places: dict[str, list[int]] = {mark: [] for mark in marks}
        for mark, place in zip(pieces[1::2], ends, strict=False):
            places[mark].append(place)
        if places[split] and text != self.render(messages, tools=tools, **options):
            raise BadRecordError(
                "the chat template handles the special tokens that a message spells out",
                hint="Remove them from the message, or set special_tokens_in_text='ids'.",
            )
        return Rendering(text, [*zip(places[begin], places[end], strict=True)], places[split])


def load_chat_template(
    name: str | None,
    tokenizer: Tokenizer,
    *,
    today: datetime.datetime | None = None,
) -> ChatTemplate:
    """Return a chat template for a tokenizer.

    Args:
      name: A name of `NAMED`, the name of a variant in the tokenizer's folder, or the path of a
        `.jinja` file or of a folder. None: the template of the tokenizer's folder.
      tokenizer: The tokenizer, whose special tokens the template writes.
      today: As in `ChatTemplate`.

    Raises:
      MissingFileError: There is no such template.
      ConfigError: The tokenizer encodes special tokens as text.
      BadRecordError: A file cannot be read, or is not a Jinja template.
    """
    encoding = getattr(tokenizer, "special_tokens_in_text", "ids")
    check_choice(type(tokenizer).__qualname__, ["ids"], special_tokens_in_text=encoding)
    file = getattr(tokenizer, "path", None)
    try:
        sources = _read_sources(Path(file).parent) if file else {}
        if name is not None:
            source = sources.get(name, NAMED.get(name))
            sources = {"default": source} if source else _read_sources(Path(name))
        for source in sources.values():
            _compile(source)
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        problem = f"cannot read the chat template ({error})"
        raise BadRecordError(problem, field="chat_template", value=name or file) from None
    if not sources:
        raise MissingFileError(
            "no such chat template" if name else "the tokenizer's folder has no chat template",
            field="chat_template",
            value=name,
            expected="a folder with a chat template, a .jinja file, or a name",
            choices=NAMED,
            hint=hub_hint(name or ""),
        )
    names = getattr(tokenizer, "special_tokens", {})
    ids = (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id)
    tokens = {role: names.get(token_id) for role, token_id in zip(ROLES, ids, strict=True)}
    tokens = getattr(tokenizer, "declared_tokens", tokens)
    stated = {role: token for role, token in tokens.items() if token is not None}
    return ChatTemplate(sources, stated, today)


def _read_sources(path: Path) -> dict[str, str]:
    """Return the templates of a folder by name, in the order of `transformers`, or of a file."""
    files = [("default", path), ("default", path / "chat_template.jinja")]
    files += [(file.stem, file) for file in sorted(path.glob("additional_chat_templates/*.jinja"))]
    sources = {name: file.read_text("utf-8") for name, file in files if file.is_file()}
    config = path / "tokenizer_config.json"
    stored = json.loads(config.read_bytes()).get("chat_template") if config.is_file() else None
    if isinstance(stored, list):
        stored = {variant["name"]: variant["template"] for variant in stored}
    return sources or ({"default": stored} if isinstance(stored, str) else stored or {})


def _with_reasoning(message: Message) -> Message:
    """Return a message as a template reads it: reasoning under each name, no null, no `train`."""
    message = {key: value for key, value in message.items() if value is not None and key != "train"}
    reasoning = [message[name] for name in _REASONING_FIELDS if name in message]
    if reasoning:
        message = {"thinking": reasoning[0], **message, "reasoning_content": reasoning[0]}
    return message


def _split(value: Any, pattern: re.Pattern[str], mark: str) -> Any:
    """Return a value of JSON with a mark after the characters in its texts that a pattern finds."""
    if isinstance(value, str):
        return pattern.sub(rf"\g<0>{mark}", value)
    if isinstance(value, Mapping):
        pairs = ((_split(key, pattern, mark), item) for key, item in value.items())
        return {key: _split(item, pattern, mark) for key, item in pairs}
    return [_split(item, pattern, mark) for item in value] if isinstance(value, list) else value


@functools.lru_cache
def _compile(source: str) -> Any:
    """Return the compiled template in an environment as that of `transformers`."""
    jinja2: Any = require_extra("jinja2", needed_by="a chat template")
    parts = ("jinja2.ext", "jinja2.nodes", "jinja2.sandbox")
    _, nodes, sandbox = map(importlib.import_module, parts)

    class Generation(jinja2.ext.Extension):
        """The block `{% generation %}`, which puts marks around its text."""

        tags = frozenset({"generation"})

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            call = self.call_method("mark", [nodes.ContextReference()])
            return nodes.CallBlock(call, [], [], body).set_lineno(line)

        def mark(self, context: Any, caller: Callable[[], str]) -> str:
            return f"{context[_MARKS][0]}{caller()}{context[_MARKS][1]}"

    class Namespace(jinja2.utils.Namespace):
        """A namespace without attributes that begin with an underscore."""

        def __init__(self, *args: Any, **attributes: Any):
            super().__init__()
            for name, value in dict(*args, **attributes).items():
                self[name] = value

        def __setitem__(self, name: str, value: Any) -> None:
            if name.startswith("_"):
                raise jinja2.exceptions.SecurityError(f"namespace attribute {name!r}")
            super().__setitem__(name, value)

    def fail(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, **options: Any) -> str:
        # A template that passes its own functions gives the last two twice, which is an error.
        return json.dumps(value, **({"ensure_ascii": False} | options), cls=None, default=None)

    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals |= {"raise_exception": fail, "namespace": Namespace}
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"line {error.lineno}: {error}") from None
