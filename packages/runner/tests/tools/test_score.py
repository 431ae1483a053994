"""`runner score FILE`: the perplexity of a loop in PyTorch over the same windows."""

from __future__ import annotations

import html
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from layerkit.errors import UserError
from layerkit_inputs import ByteTokenizer
from layerkit_runner.tools.score import run_score, score_page

CHIP = re.compile(r'<i[^>]* title="([^"]*)">([^<]*)</i>')
SIGNS = str.maketrans(" \n", "␣⏎")


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
    tokens.decoder = hf.decoders.Fuse()
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
    losses: list[float] = []
    done = 1
    for begin in range(0, ids.shape[1], stride):
        end = min(begin + max_length, ids.shape[1])
        with torch.no_grad():
            log_probs = llama(ids[:, begin:end]).logits.log_softmax(-1)
        # The logits of a position predict the id of the next one.
        labels = ids[0, done:end, None]
        losses += (-log_probs[0, done - 1 - begin : -1].gather(1, labels)[:, 0]).tolist()
        done = end
        if end == ids.shape[1]:
            break
    total, file = sum(losses), tmp_path / "page.html"
    flags = [f"--model={tmp_path}", f"--max_length={max_length}", f"--stride={stride}", "--json"]
    assert run_score([str(tmp_path / "text"), *flags, f"--html={file}"]) == 0
    scores = json.loads(capsys.readouterr().out)
    assert scores["tokens"] == len(text)
    assert scores["bytes"] == len(text.encode())
    assert scores["nats_per_token"] == pytest.approx(total / len(text), rel=1e-5)
    assert scores["perplexity"] == pytest.approx(math.exp(total / len(text)), rel=1e-5)
    bits = total / math.log(2) / len(text.encode())
    assert scores["bits_per_byte"] == pytest.approx(bits, rel=1e-5)

    chips = CHIP.findall(file.read_text())
    assert "".join(html.unescape(chip[-1]) for chip in chips) == f"<s>{text}".translate(SIGNS)
    facts = [dict(re.findall(r"(id|position) (\d+)", title)) for title, _ in chips]
    assert [int(fact["id"]) for fact in facts] == ids[0].tolist()
    assert [int(fact["position"]) for fact in facts] == [*range(len(chips))]
    shown = [float(nats) for nats in re.findall(r"([\d.]+) nats ·", file.read_text())]
    assert shown == pytest.approx(losses, rel=1e-4)
    assert sum(shown) == pytest.approx(scores["nats_per_token"] * scores["tokens"], rel=1e-6)


@pytest.mark.parametrize(("width", "dark"), [(1400, False), (400, False), (1400, True)])
def test_page_of_losses_in_browser(open_page: Any, tmp_path: Path, width: int, dark: bool):
    text = "<script>\u202e\n" * 1000
    ids = ByteTokenizer().encode(text)
    losses = np.linspace(0, 10, len(ids) - 1)
    scores = {"tokens": len(losses), "nats_per_token": 5.0}
    page_text = score_page("a<b>\n", scores, ids, losses, ByteTokenizer())
    assert len(page_text) < 1_000_000
    (tmp_path / "score.html").write_text(page_text)
    page = open_page(tmp_path / "score.html", width=width, dark=dark)
    assert page.locator("h1").inner_text() == r"Loss of each token of a<b>\n"
    assert "The first 6,000 of 12,000 tokens are drawn" in page.content()
    assert page.locator("figure rect").count() == 100
    chips = page.locator(".tokens i")
    assert chips.count() == 6000
    color = "i => Number(getComputedStyle(i).backgroundColor.match(/[\\d.]+(?=\\))/))"
    opacities = [chips.nth(index).evaluate(color) for index in (1, 2000, 5999)]
    assert opacities == pytest.approx([0, 0.8 * 1.667 / 9.8, 0.8 * 5 / 9.8], abs=0.02)


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
