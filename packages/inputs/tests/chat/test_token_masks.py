"""Token ids of conversations, and which of them have loss."""

from layerkit_inputs import ByteTokenizer
from layerkit_inputs.chat.conversations import Conversation
from layerkit_inputs.chat.template import load_chat_template
from layerkit_inputs.chat.token_masks import encode_conversation, encode_prompt


def test_bytes_have_the_end_id_where_the_template_ends_a_turn_and_text_elsewhere():
    tokenizer = ByteTokenizer()
    template = load_chat_template("zephyr", tokenizer)
    user, answer = {"role": "user", "content": "EOS?"}, {"role": "assistant", "content": "é"}
    ids, has_loss = encode_conversation(Conversation([user, answer]), template, tokenizer)
    texts = [b"<|user|>\nEOS?", b"\n<|assistant|>\n", "é".encode(), b"\n"]
    text, middle, turn, line = map(tokenizer.encode, texts)
    assert ids.tolist() == [*text, 2, *middle, *turn, 2, *line]
    assert has_loss.tolist() == [False] * (len(text) + 1 + len(middle)) + [True] * 4
    prompt = encode_prompt(Conversation([user]), template, tokenizer)
    assert prompt.tolist() == [*text, 2, *middle]
