"""The token ids of a conversation, and which of them the assistant wrote.

The places of the assistant's turns come from the `{% generation %}` blocks of a template. In a
template without them, a turn is what its rendering adds to that of the messages before it with the
generation prompt. This holds only if later messages leave the text of a turn as it is, which
`encode_conversation` checks.

A special token that a message spells out is encoded as text: its first character and the others
are encoded apart. So are tokens such as `<think>`, which are not special but which the template
writes, in the messages of users and tools. All other text has the ids of `transformers`.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from layerkit_inputs.base.errors import BadRecordError
from layerkit_inputs.base.tokenizer_interface import Tokenizer
from layerkit_inputs.chat.conversations import Conversation
from layerkit_inputs.chat.template import ChatTemplate, SplitText
from layerkit_inputs.text.tokenizers import SpecialTokensInText

LossOn = Literal["all", "last", "train"]
"""Turns of the assistant that have loss: all, the last, or those whose `train` flag is true."""
Span = tuple[int, int]
"""Begin and end in a text, in characters."""
Encode = Callable[[str], tuple[np.ndarray, np.ndarray]]


class ChatTokens(NamedTuple):
    """The tokens of a conversation."""

    ids: np.ndarray
    """Token ids, int32 `[tokens]`."""
    has_loss: np.ndarray
    """Whether a token counts, as a target, bool `[tokens]`."""


def encode_conversation(
    conversation: Conversation,
    template: ChatTemplate,
    tokenizer: Tokenizer,
    *,
    loss_on: LossOn = "all",
    special_tokens_in_text: SpecialTokensInText = "text",
) -> ChatTokens:
    """Return the ids of a conversation, and which tokens have loss.

    Args:
      conversation: The conversation. Its prompt messages have no loss.
      template: Chat template, which writes the special tokens, also those at the start and end.
      tokenizer: Tokenizer of the model.
      loss_on: Turns of the assistant with loss.
      special_tokens_in_text: Encoding of special tokens that a message spells out.

    Raises:
      BadRecordError: The template cannot render the messages, the places of the turns cannot be
        determined, or a flag is missing.
    """
    messages, tools = conversation.messages, conversation.tools
    split_text = _splitter(template, tokenizer, tools, special_tokens_in_text)
    text, generated, splits = template.locate(messages, tools=tools, split_text=split_text)
    turns = _select_turns(conversation, loss_on)
    if "endgeneration" in template.source(tools):
        spans = _spans_of_blocks(conversation, turns, generated)
    else:
        spans = [_span_of_turn(conversation, template, text, turn) for turn in turns]
    ids, offsets = _encode(tokenizer, text, splits, spans)
    has_loss = np.zeros(len(ids), bool)
    for begin, end in spans:
        has_loss |= (offsets[:, 0] < end) & (offsets[:, 1] > begin)
    return ChatTokens(ids, has_loss)


def encode_prompt(
    conversation: Conversation,
    template: ChatTemplate,
    tokenizer: Tokenizer,
    *,
    special_tokens_in_text: SpecialTokensInText = "text",
) -> np.ndarray:
    """Return the ids of a conversation up to where the assistant's answer begins, int32 `[tokens]`.

    Args:
      conversation: The conversation, which ends before an answer.
      template: As in `encode_conversation`.
      tokenizer: As in `encode_conversation`.
      special_tokens_in_text: As in `encode_conversation`.

    Raises:
      BadRecordError: The template cannot render the messages.
    """
    messages, tools = conversation.messages, conversation.tools
    split_text = _splitter(template, tokenizer, tools, special_tokens_in_text)
    text, _, splits = template.locate(
        messages, tools=tools, add_generation_prompt=True, split_text=split_text
    )
    return _encode(tokenizer, text, splits, [])[0]


def turn_ends(template: ChatTemplate, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the ids of the special tokens that a template writes after an answer, maybe none."""
    turns = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
    end = template.render(turns).rpartition("answer")[2]
    special = getattr(tokenizer, "special_tokens", {})
    return tuple(token_id for token_id, name in special.items() if name and name in end)


def _select_turns(conversation: Conversation, loss_on: LossOn) -> list[int]:
    """Return the positions of the messages that have loss."""
    messages, first = conversation.messages, conversation.num_prompt_messages
    turns = [i for i, m in enumerate(messages) if i >= first and m["role"] == "assistant"]
    if loss_on == "all":
        return turns
    if loss_on == "last":
        return turns[-1:]
    for turn in turns:
        if "train" not in messages[turn]:
            expected = "true or false in each assistant message, since loss_on='train'"
            raise BadRecordError(field=f"messages[{turn}].train", value=None, expected=expected)
    return [turn for turn in turns if messages[turn]["train"]]


def _spans_of_blocks(
    conversation: Conversation, turns: Sequence[int], generated: Sequence[Span]
) -> list[Span]:
    """Return the generation blocks of some turns, in characters."""
    messages = conversation.messages
    assistant = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if turns == assistant:
        return [*generated]
    if len(assistant) != len(generated):
        raise BadRecordError(
            f"the chat template has {len(generated)} generation blocks for {len(assistant)}"
            " assistant turns, so single turns cannot be selected",
            hint="Use loss_on='all'.",
        )
    return [generated[assistant.index(turn)] for turn in turns]


def _span_of_turn(conversation: Conversation, template: ChatTemplate, text: str, turn: int) -> Span:
    """Return the begin and end of a turn of the assistant in the text of a conversation."""
    messages, tools = conversation.messages, conversation.tools
    if not turn:
        hint = "Use a template with {% generation %} blocks."
        raise BadRecordError("the conversation begins with the assistant", hint=hint)
    prompt = template.render(messages[:turn], tools=tools, add_generation_prompt=True)
    through = text
    if turn + 1 < len(messages):
        through = template.render(messages[: turn + 1], tools=tools)
        # Some templates put the end token after a whole conversation.
        if not text.startswith(through):
            through = through.removesuffix(str(template.variables.get("eos_token", "")))
    if text.startswith(prompt) and through.startswith(prompt) and text.startswith(through):
        return len(prompt), len(through)
    raise BadRecordError(
        f"the chat template rewrites the text of messages[:{turn + 1}] when messages follow, or"
        " writes another generation prompt, so the tokens of the assistant cannot be determined",
        hint="Set loss_on='last', or chat_template to a copy of the template with"
        " {% generation %} and {% endgeneration %} around what the assistant writes.",
    )


def _splitter(
    template: ChatTemplate, tokenizer: Tokenizer, tools: Any, encoding: SpecialTokensInText
) -> SplitText:
    """Return the function that splits the special tokens in the text of a message."""
    if encoding == "ids":
        return lambda mark, role, text: text
    special = frozenset(getattr(tokenizer, "special_tokens", {}).values())
    source = template.source(tools)
    added = getattr(tokenizer, "added_tokens", ())
    written = frozenset(token for token in added if token in source and not token.isspace())
    in_assistant, in_others = _begins(special), _begins(special | written)

    def split_text(mark: str, role: str | None, text: str) -> str:
        pattern = in_others if role in ("user", "tool") else in_assistant
        return pattern.sub(rf"\1{mark}", text)

    return split_text


@functools.lru_cache
def _begins(tokens: frozenset[str]) -> re.Pattern[str]:
    """Return a pattern of the first characters of tokens, which may overlap."""
    names = "|".join(re.escape(token) for token in sorted(tokens) if len(token) > 1)
    return re.compile(f"(?=(?:{names}))(.)" if names else "(?!)()", re.DOTALL)


def _encode(
    tokenizer: Tokenizer, text: str, splits: Sequence[int], spans: Sequence[Span]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the ids of a text, int32 `[tokens]`, and their places, int64 `[tokens, 2]`.

    A tokenizer that does not give places encodes special tokens and spans apart.
    """
    encode, cuts = getattr(tokenizer, "encode_with_offsets", None), {0, *splits, len(text)}
    special: dict[str, int] = {}
    if encode is None:
        encode = functools.partial(_encode_whole, tokenizer)
        special = {
            name: token_id for token_id, name in getattr(tokenizer, "special_tokens", {}).items()
        }
        names = re.compile("|".join(map(re.escape, special)) or "(?!)")
        pieces = itertools.pairwise(sorted(cuts))
        tokens = [match.span() for piece in pieces for match in names.finditer(text, *piece)]
        cuts |= {place for span in [*tokens, *spans] for place in span}
    ids, offsets = [np.empty(0, np.int32)], [np.empty((0, 2), np.int64)]
    for begin, end in itertools.pairwise(sorted(cuts)):
        piece = text[begin:end]
        if piece in special:
            piece_ids, places = np.array([special[piece]], np.int32), np.array([[0, len(piece)]])
        else:
            piece_ids, places = encode(piece) if begin == 0 else _encode_within(encode, piece)
        ids.append(piece_ids)
        offsets.append(places + begin)
    return np.concatenate(ids), np.concatenate(offsets)


def _encode_whole(tokenizer: Tokenizer, text: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the ids of a text, and the place of the whole text for each."""
    ids = tokenizer.encode(text)
    return ids, np.tile([0, len(text)], (len(ids), 1))


def _encode_within(encode: Encode, text: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the ids and places of a text that does not begin a document.

    Some tokenizers put a space before a document. So the text is encoded after a line break, whose
    ids are removed.
    """
    ids, places = encode(f"\n{text}")
    first = encode("\n")[0]
    if not np.array_equal(ids[: len(first)], first):
        return encode(text)
    return ids[len(first) :], np.maximum(places[len(first) :] - 1, 0)
