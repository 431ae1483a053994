"""`runner score FILE`: the perplexity of a loop in PyTorch over the same windows."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from layerkit.errors import UserError
from layerkit_runner.tools.score import run_score


@pytest.mark.parametrize(("max_length", "stride"), [(16, 4), (16, 15), (64, 32)])
def test_scores_equal_those_of_a_loop_in_pytorch(
    max_length: int, stride: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    torch, transformers = map(pytest.importorskip, ("torch", "transformers"))
    import tokenizers as hf

    text = "a b c d é f g h " * 6 + "a\n"
    vocab = {token: index for index, token in enumerate(["<s>", *"abcdéfgh \n"])}
    tokens = hf.Tokenizer(hf.models.WordLevel(vocab, unk_token="<s>"))
    tokens.pre_tokenizer = hf.pre_tokenizers.Split("", "isolated")
    tokens.post_processor = hf.processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 0)]
    )
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokens, bos_token="<s>")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 11}
    heads = {"num_attention_heads": 2, "max_position_embeddings": 64}
    config = transformers.LlamaConfig(**sizes, **heads, bos_token_id=0, eos_token_id=None)
    llama = transformers.LlamaForCausalLM(config).eval()
    llama.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "text").write_text(text)

    ids = torch.tensor([tokenizer(text)["input_ids"]])
    assert ids.shape[1] == len(text) + 1
    total, done = 0.0, 1
    for begin in range(0, ids.shape[1], stride):
        end = min(begin + max_length, ids.shape[1])
        with torch.no_grad():
            log_probs = llama(ids[:, begin:end]).logits.log_softmax(-1)
        # The logits of a position predict the id of the next one.
        labels = ids[0, done:end, None]
        total -= log_probs[0, done - 1 - begin : -1].gather(1, labels).sum().item()
        done = end
        if end == ids.shape[1]:
            break
    flags = [f"--model={tmp_path}", f"--max_length={max_length}", f"--stride={stride}", "--json"]
    assert run_score([str(tmp_path / "text"), *flags]) == 0
    scores = json.loads(capsys.readouterr().out)
    assert scores["tokens"] == len(text)
    assert scores["bytes"] == len(text.encode())
    assert scores["nats_per_token"] == pytest.approx(total / len(text), rel=1e-5)
    assert scores["perplexity"] == pytest.approx(math.exp(total / len(text)), rel=1e-5)
    bits = total / math.log(2) / len(text.encode())
    assert scores["bits_per_byte"] == pytest.approx(bits, rel=1e-5)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["a.txt"], {"field": "files"}),
        (["nowhere.txt", "--model=x"], {"owner": "`runner score`"}),
        (["a.txt", "--model=x", "--strid=3"], {"value": "--strid"}),
    ],
)
def test_flags_are_checked(words: list[str], error: dict[str, Any], raises: Any):
    with raises(UserError, **error):
        run_score(words)
