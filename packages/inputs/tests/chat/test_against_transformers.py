"""Text, ids and masks of conversations against `transformers.apply_chat_template`.

`templates` holds the chat templates of released models. All but SmolLM3's lack `{% generation %}`
marks. `templates/marked` holds copies with marks, whose masks by `transformers` are the reference
of those that are determined from the originals.
"""

from __future__ import annotations

import functools
import random
import re
from pathlib import Path

import pytest

from layerkit_inputs import HuggingFaceTokenizer
from layerkit_inputs.base.errors import BadRecordError
from layerkit_inputs.chat.conversations import Conversation
from layerkit_inputs.chat.template import load_chat_template
from layerkit_inputs.chat.token_masks import encode_conversation, encode_prompt

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

TEMPLATES = Path(__file__).parent / "templates"
NAMES = sorted(path.stem for path in TEMPLATES.glob("*.jinja"))
WITH_SPACE = {"llama2", "mistral_v01", "mistral_v03", "mixtral", "zephyr"}
REWRITE_HISTORY = {"qwen3", "deepseek_r1", "mistral_v03"}
"""Templates that render a turn in another way when messages follow."""
TEXT = "".join(path.read_text() for path in sorted(TEMPLATES.glob("*.jinja")))
CONTROL = re.findall(r"<[|\uff5c]\w+[|\uff5c]>|<\w+_of_turn>|\[/?[A-Z_]+\]|<sop>", TEXT)
SPECIAL = ["<s>", "</s>", "<pad>", *sorted(set(CONTROL))]
ADDED = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
WORDS = [
    *("hello", "World", "  two  spaces", "\n", "naïve 😀", "日本語", "x=1", "", "\ttab", "e\u0301"),
    *('{"a": 1}', "<b>", "'q'", '"dq"', "👩‍👩‍👧 end", " lead", "trail ", "\r\n", "|", "\u00a0"),
]  # fmt: skip
CITY = {"type": "object", "properties": {"city": {"type": "string", "description": 'The "city"'}}}
FUNCTION = {"name": "get_weather", "description": "Wéather", "parameters": CITY}
TOOLS = [{"type": "function", "function": FUNCTION}]


def train_tokenizer(folder, *, with_space: bool):
    """Write a tokenizer as that of Llama 2, which puts a space before a text, or of Llama 3."""
    model = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=with_space))
    if with_space:
        steps = [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
        model.normalizer = tokenizers.normalizers.Sequence(steps)
    else:
        model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        model.post_processor = tokenizers.processors.ByteLevel(trim_offsets=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=[*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256) if with_space)],
        initial_alphabet=[] if with_space else tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        limit_alphabet=80 if with_space else 256,
        show_progress=False,
    )
    model.train_from_iterator([*WORDS[:8], TEXT], trainer)
    model.add_tokens([tokenizers.AddedToken(token, normalized=False) for token in ADDED])
    reference = transformers.PreTrainedTokenizerFast(
        tokenizer_object=model, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    reference.save_pretrained(folder)
    file = folder / "tokenizer.json"
    # As in Llama 3's file, under which `transformers` loses turns that begin with a space.
    file.write_text(file.read_text().replace('"trim_offsets": false', '"trim_offsets": true'))
    return reference, HuggingFaceTokenizer(path=str(folder))


@pytest.fixture(scope="session")
def both_tokenizers(tmp_path_factory):
    """Return the tokenizers of `transformers` and ours, by whether they put a space."""
    folder = tmp_path_factory.mktemp("tokenizers")
    return {key: train_tokenizer(folder / str(key), with_space=key) for key in (True, False)}


def write_text(rng, most=6):
    return "".join(
        rng.choice(WORDS) + rng.choice([" ", "", "\n"]) for _ in range(rng.randint(0, most))
    )


def generate_conversation(rng):
    """Return messages and tools: roles, empty turns, Unicode, calls of tools, reasoning."""
    messages = [{"role": "system", "content": write_text(rng)}] if rng.random() < 0.4 else []
    tools = TOOLS if rng.random() < 0.3 else None
    for _ in range(rng.randint(1, 3)):
        messages.append({"role": "user", "content": write_text(rng)})
        if tools and rng.random() < 0.6:
            arguments = {"city": write_text(rng, 2)}
            function = {"name": "get_weather", "arguments": arguments}
            call = {"id": "call12345", "type": "function", "function": function}
            content = rng.choice([{}, {"content": None}, {"content": write_text(rng, 2)}])
            messages.append({"role": "assistant", "tool_calls": [call], **content})
            result = {"name": "get_weather", "content": write_text(rng, 2)}
            messages.append({"role": "tool", "tool_call_id": "call12345", **result})
        reasoning = {"reasoning_content": write_text(rng, 2)} if rng.random() < 0.2 else {}
        messages.append({"role": "assistant", "content": write_text(rng), **reasoning})
    ends_with_user = messages[-2]["role"] == "user" and rng.random() < 0.1
    return messages[:-1] if ends_with_user else messages, tools


def complete(mask, places):
    """Return a mask of `transformers` with all tokens of the last character of each block.

    It marks only the first of them.
    """
    for i in range(1, len(mask)):
        mask[i] |= mask[i - 1] and (places[i] == places[i - 1]).all()
    return mask


@pytest.mark.parametrize("count", [6, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", NAMES)
def test_text_ids_and_mask_equal_those_of_transformers(name, count, both_tokenizers):
    reference, tokenizer = both_tokenizers[name in WITH_SPACE]
    path = TEMPLATES / f"{name}.jinja"
    template, source = load_chat_template(str(path), tokenizer), path.read_text()
    marked = path if name == "smollm3" else TEMPLATES / "marked" / path.name
    masked = marked.read_text() if marked.exists() else None
    num_masks = num_errors = 0
    for seed in range(count):
        messages, tools = generate_conversation(random.Random(f"{name} {seed}"))
        apply = functools.partial(reference.apply_chat_template, messages, tools=tools)
        conversation = Conversation(messages, tools)
        try:
            text = apply(chat_template=source, tokenize=False)
        except Exception:  # of any class: the template refuses the roles, for example
            with pytest.raises(BadRecordError, match="cannot render"):
                encode_conversation(conversation, template, tokenizer)
            continue
        assert template.render(messages, tools=tools) == text
        prompt = apply(chat_template=source, add_generation_prompt=True)["input_ids"]
        assert encode_prompt(conversation, template, tokenizer).tolist() == prompt
        try:
            ids, has_loss = encode_conversation(conversation, template, tokenizer)[:2]
        except BadRecordError:
            assert name in REWRITE_HISTORY, seed
            num_errors += 1
            continue
        assert ids.tolist() == apply(chat_template=source)["input_ids"]
        if masked is not None:
            both = apply(chat_template=masked, return_dict=True, return_assistant_tokens_mask=True)
            assert both["input_ids"] == ids.tolist(), "the marks change the text"
            places = tokenizer.encode_with_offsets(text)[1]
            assert has_loss.tolist() == complete(both["assistant_masks"], places), seed
            num_masks += 1
    assert num_masks > 0 or masked is None
    assert num_errors > 0 or name not in REWRITE_HISTORY
