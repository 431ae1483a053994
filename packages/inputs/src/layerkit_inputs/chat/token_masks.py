"""The token ids of a conversation, and which of them the assistant wrote.

The turns of the assistant are the `{% generation %}` blocks of a template. In a template without
them, a turn is what its rendering adds to that of the messages before it with the generation
prompt, provided that later messages leave that text as it is.

A special token that a message spells out is encoded as text: its first character apart from the
others. So are tokens that a template writes but that are not special, such as `<think>`, in the
messages of users and tools. All other text has the ids of `transformers`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from layerkit.config.checks import require
from layerkit_inputs.base.errors import BadRecordError
from layerkit_inputs.base.tokenizer_interface import Tokenizer
from layerkit_inputs.chat.conversations import Conversation
from layerkit_inputs.chat.images import ChatImages
from layerkit_inputs.chat.template import ChatTemplate, Rendering
from layerkit_inputs.text.tokenizers import SpecialTokensInText

LossOn = Literal["all", "last", "train"]
"""Turns of the assistant that have loss: all, the last, or those whose `train` flag is true."""
_Encoded = tuple[np.ndarray, np.ndarray]


class ChatTokens(NamedTuple):
    """The tokens of a conversation."""

    ids: np.ndarray
    """Token ids, int32 `[tokens]`."""
    has_loss: np.ndarray
    """Whether a token counts, as a target, bool `[tokens]`."""
    images: Sequence[Any] = ()
    """Names of the images, or their `ImageSource`, in the order of their placeholders."""


def encode_conversation(
    conversation: Conversation,
    template: ChatTemplate,
    tokenizer: Tokenizer,
    *,
    loss_on: LossOn = "all",
    special_tokens_in_text: SpecialTokensInText = "text",
    images: ChatImages | None = None,
) -> ChatTokens:
    """Return the ids of a conversation, and which tokens have loss.

    Args:
      conversation: The conversation. Its prompt messages have no loss.
      template: Chat template, which also writes the special tokens at the start and end.
      tokenizer: Tokenizer of the model.
      loss_on: Turns of the assistant with loss.
      special_tokens_in_text: Encoding of special tokens that a message spells out.
      images: Form of images, whose placeholders have no loss. None: images raise an error.

    Raises:
      BadRecordError: The template cannot render the messages, the places of the turns cannot be
        determined, or the messages have images that are not supported.
      UnicodeError: A message is not Unicode.
      ConfigError: A `train` flag is missing, or `loss_on` cannot select generation blocks.
    """
    messages, first = conversation.messages, conversation.num_prompt_messages
    rendering = _render(conversation, template, tokenizer, special_tokens_in_text)
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    turns = [turn for turn in answers if turn >= first][-1 if loss_on == "last" else 0 :]
    if loss_on == "train":
        for turn in turns:
            expected = "true or false in the assistant's messages, since loss_on='train'"
            require("train" in messages[turn], None, f"messages[{turn}].train", None, expected)
        turns = [turn for turn in turns if messages[turn]["train"]]
    spans = rendering.generated
    if not spans:
        spans = [_find_turn(conversation, template, rendering.text, turn) for turn in turns]
    elif turns != answers:
        counts = {"generation blocks": len(spans), "assistant turns": len(answers)}
        expected = "one block for a turn, or loss_on='all'"
        require(len(spans) == len(answers), None, "chat_template", counts, expected)
        spans = [span for span, turn in zip(spans, answers, strict=True) if turn in turns]
    rendering, spans = _expand(conversation, rendering, spans, images)
    ids, places = _encode(tokenizer, rendering, spans)
    has_loss = np.zeros(len(ids), bool)
    for begin, end in spans:
        has_loss |= (places[:, 0] < end) & (places[:, 1] > begin)
    if images is not None:
        has_loss &= ids != images.placeholder_id(tokenizer)
    return ChatTokens(ids, has_loss, conversation.images)


def encode_prompt(
    conversation: Conversation,
    template: ChatTemplate,
    tokenizer: Tokenizer,
    *,
    special_tokens_in_text: SpecialTokensInText = "text",
    images: ChatImages | None = None,
) -> np.ndarray:
    """Return the ids of a conversation and of the generation prompt, int32 `[tokens]`.

    Arguments and errors are those of `encode_conversation`.
    """
    rendering = _render(
        conversation, template, tokenizer, special_tokens_in_text, add_generation_prompt=True
    )
    return _encode(tokenizer, _expand(conversation, rendering, [], images)[0], [])[0]


def leaves_out_tools(conversation: Conversation, template: ChatTemplate) -> bool:
    """Return whether the text of a conversation lacks the name of a tool, or of a call."""
    calls = (call for message in conversation.messages for call in message.get("tool_calls", ()))
    parts = [part.get("function") for part in (*(conversation.tools or ()), *calls)]
    names = [str(part["name"]) for part in parts if isinstance(part, dict) and "name" in part]
    text = template.render(conversation.messages, tools=conversation.tools) if names else ""
    return any(name not in text for name in names)


def turn_ends(template: ChatTemplate, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the ids of the special tokens that a template writes after an answer, in order."""
    turns = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
    end = template.render(turns).rpartition("answer")[2]
    special = getattr(tokenizer, "special_tokens", {}).items()
    written = [(end.find(name), token_id) for token_id, name in special if name and name in end]
    return tuple(token_id for _, token_id in sorted(written))


def _find_turn(
    conversation: Conversation, template: ChatTemplate, text: str, turn: int
) -> tuple[int, int]:
    """Return where a turn of the assistant begins and ends in the text of a conversation."""
    messages = conversation.messages
    render = functools.partial(template.render, tools=conversation.tools)
    prompt = bare = ""
    with contextlib.suppress(*() if turn else (BadRecordError,)):
        prompt = render(messages[:turn], add_generation_prompt=True)
        bare = "" if turn else render([])
    expected = "a user, unless the template has {% generation %} blocks or begins with a prompt"
    require(turn or prompt != bare, None, "messages[0].role", "assistant", expected)
    through = render(messages[: turn + 1]) if turn + 1 < len(messages) else text
    if not text.startswith(through):
        # Some templates put the end token after a whole conversation.
        through = through.removesuffix(template.variables.get("eos_token", ""))
    for before in (prompt, through):
        if not text.startswith(before) or not before.startswith(prompt):
            pairs = enumerate(zip(text, before, strict=False))
            place = next((i for i, (here, there) in pairs if here != there), 0)
            raise BadRecordError(
                f"the chat template renders messages[:{turn + 1}] in another way when messages"
                f" follow ({text[place:][:20]!r} instead of {before[place:][:20]!r}), so the tokens"
                " of the assistant cannot be determined",
                hint="Set loss_on='last', or chat_template to one with {% generation %} and"
                " {% endgeneration %} around what the assistant writes.",
            )
    return len(prompt), len(through)


def _render(
    conversation: Conversation,
    template: ChatTemplate,
    tokenizer: Tokenizer,
    encoding: SpecialTokensInText,
    **options: Any,
) -> Rendering:
    """Return the rendering of a conversation, split in the special tokens of its messages."""
    if encoding == "text":
        special = tuple(getattr(tokenizer, "special_tokens", {}).values())
        added = tuple(getattr(tokenizer, "added_tokens", ()))
        options["patterns"] = _token_patterns(special, added, template.source(conversation.tools))
    return template.locate(conversation.messages, tools=conversation.tools, **options)


def _expand(
    conversation: Conversation,
    rendering: Rendering,
    spans: list[tuple[int, int]],
    images: ChatImages | None,
) -> tuple[Rendering, list[tuple[int, int]]]:
    """Return a rendering and its spans with the placeholders of the images."""
    num_images = len(conversation.images)
    if images is None:
        expected = "no images, since the field `images` of the input is None"
        require(not num_images, None, "images", num_images, expected, BadRecordError)
        return rendering, spans
    return images.expand(rendering, spans, num_images)


@functools.lru_cache
def _token_patterns(
    special: Sequence[str], added: Sequence[str], source: str
) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Return patterns of the first characters of tokens, in messages of users and in others."""
    written = [token for token in added if token in source and not token.isspace()]

    def compile_begins(tokens: Sequence[str]) -> re.Pattern[str]:
        names = "|".join(re.escape(token) for token in tokens if len(token) > 1)
        # Tokens may overlap.
        return re.compile(f"(?=(?:{names})).", re.DOTALL) if names else re.compile("(?!)")

    return compile_begins([*special, *written]), compile_begins(special)


def _encode(
    tokenizer: Tokenizer, rendering: Rendering, spans: Sequence[tuple[int, int]]
) -> _Encoded:
    """Return the ids of a text, int32 `[tokens]`, and their places, int64 `[tokens, 2]`.

    A tokenizer without places encodes special tokens and spans apart.
    """
    text, cuts, special = rendering.text, {0, *rendering.splits, len(rendering.text)}, {}
    encode: Callable[[str], _Encoded] | None = getattr(tokenizer, "encode_with_offsets", None)
    if encode is None:
        encode = functools.partial(_encode_whole, tokenizer)
        names_by_id = getattr(tokenizer, "special_tokens", {})
        special = {name: token_id for token_id, name in names_by_id.items()}
        names = re.compile("|".join(map(re.escape, special)) or "(?!)")
        pieces = itertools.pairwise(sorted(cuts))
        tokens = [match.span() for piece in pieces for match in names.finditer(text, *piece)]
        cuts.update(*tokens, *spans)
    encoded = [(np.empty(0, np.int32), np.empty((0, 2), np.int64))]
    for begin, end in itertools.pairwise(sorted(cuts)):
        piece = text[begin:end]
        if piece in special:
            ids, places = np.array([special[piece]], np.int32), np.array([[0, end - begin]])
        else:
            ids, places = _encode_within(encode, piece) if begin else encode(piece)
        encoded.append((ids, places + begin))
    all_ids, all_places = map(np.concatenate, zip(*encoded, strict=True))
    return all_ids, all_places


def _encode_whole(tokenizer: Tokenizer, text: str) -> _Encoded:
    """Return the ids of a text, and the place of the text for each of them."""
    ids = tokenizer.encode(text)
    return ids, np.tile([0, len(text)], (len(ids), 1))


def _encode_within(encode: Callable[[str], _Encoded], text: str) -> _Encoded:
    """Return the ids and places of a text after other text.

    It is encoded after a line break, since some tokenizers put a space before a text.
    """
    line_break, (ids, places) = encode("\n")[0], encode(f"\n{text}")
    size = len(line_break)
    if not np.array_equal(ids[:size], line_break):
        return encode(text)
    return ids[size:], np.maximum(places[size:] - 1, 0)
