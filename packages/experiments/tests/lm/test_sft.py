"""Fields of chat fine-tuning: the end of a turn, bytes, and what does not fit together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from layerkit.config import build
from layerkit.errors import ConfigError
from layerkit_experiments.lm.quickstart import LocalText
from layerkit_experiments.lm.sft import Chat, ChatQlora
from layerkit_experiments.recipes.chat_files import ChatFiles
from layerkit_inputs.base.errors import MissingFileError
from layerkit_inputs.chat.chat_input import ChatInput, ChatPrompts

CONFIG = {
    "model_type": "llama", "vocab_size": 16, "hidden_size": 8, "intermediate_size": 16,
    "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "eos_token_id": 1,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder of a model and a tokenizer with the tokens of ChatML, without a template."""
    tokenizers = pytest.importorskip("tokenizers")
    words = {"<s>": 0, "</s>": 1, "<|im_start|>": 2, "<|im_end|>": 3, "once": 4}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<s>"))
    tokenizer.add_special_tokens([*words][:4])
    folder = tmp_path / "llama"
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def test_decoding_ends_where_a_turn_ends(folder: Path):
    fields = {"HF_FOLDER": str(folder), "CHAT_FILES": ["a.jsonl"], "MAX_SEQ_LEN": 64}
    experiment = Chat(**fields, CHAT_TEMPLATE="chatml")
    experiment.validate()
    assert experiment.task().model.decoder.eos_id == (1, 3)
    train, heldout = experiment.datasets()
    assert (train.seq_length, train.loss_on, heldout.split) == (64, "all", "heldout")
    with pytest.raises(MissingFileError, match="no chat template: CHAT_TEMPLATE=.*llama"):
        Chat(**fields).task()
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    with pytest.raises(ConfigError, match="special token"):
        Chat(**fields).task()


def test_weights_in_integers_need_adapters(folder: Path, raises: Any):
    fields = {"HF_FOLDER": str(folder), "CHAT_FILES": ["a.jsonl"], "CHAT_TEMPLATE": "chatml"}
    model = ChatQlora(**fields, WEIGHT_FORMAT="nf4:8").model()
    assert model.weight_format == "nf4:8"
    assert model.lm_tpl.stack_tpl.layer_tpl.attention_tpl.key_tpl.dot_tpl.rank == 16
    with raises(ConfigError, field="WEIGHT_FORMAT", value="nf4"):
        Chat(**fields, WEIGHT_FORMAT="nf4").validate()


class Bytes(ChatFiles, LocalText):
    """A model of bytes that is tuned on conversations."""

    TOKENIZER = "bytes"
    CHAT_TEMPLATE = "zephyr"


def test_a_model_of_bytes_is_tuned_on_conversations(tmp_path: Path, raises: Any):
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    (tmp_path / "a.jsonl").write_text(f"{json.dumps({'messages': turns})}\n" * 2)
    fields = {"CHAT_FILES": [str(tmp_path / "a.jsonl")], "HELDOUT_FILES": [str(tmp_path)]}
    experiment = Bytes(**fields)
    assert experiment.task().model.decoder.eos_id == 2
    sources = [*experiment.datasets(), *experiment.decode_datasets()]
    kinds = [type(build(config.set(batch_size=1, split="all"))) for config in sources]
    assert kinds == [ChatInput, ChatInput, ChatPrompts]
    with raises(ConfigError, field="VOCAB_SIZE", value=100):
        Bytes(**fields, VOCAB_SIZE=100).task()
