"""Special tokens of published folders, against `transformers.AutoTokenizer`, and their use."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from layerkit.errors import ConfigError
from layerkit_inputs import (
    HuggingFaceInput,
    HuggingFacePrompts,
    HuggingFaceTokenizer,
    LocalText,
    LocalTextPrompts,
    SentencePieceTokenizer,
    StreamPacker,
    TokenRecords,
    lm_features,
)
from layerkit_inputs.base.tokenizer_interface import end_disagreement, end_ids, first_ids, prefix_id
from layerkit_inputs.packing.documents import framed
from layerkit_inputs.tools.build_token_records import build_token_records

tokenizers = pytest.importorskip("tokenizers")
END = "<|endoftext|>"
CHAT = ["<|im_start|>", "<|im_end|>"]
LLAMA = ["<unk>", "<s>", "</s>"]
LLAMA_3 = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"]


def byte_level(*special: str) -> Any:
    """Return a byte-level BPE whose special tokens follow the bytes, as GPT-2's."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {byte: number for number, byte in enumerate(alphabet)}
    model = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    model.add_special_tokens(list(special))
    return model


def pieces(*special: str, prefix: bool = True) -> Any:
    """Return a BPE with byte fallback whose special tokens come first, as Llama 2's."""
    names = [*special, *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary = {name: number for number, name in enumerate(names)}
    bpe = tokenizers.models.BPE(
        vocabulary, [], unk_token="<unk>", fuse_unk=True, byte_fallback=True
    )
    model = tokenizers.Tokenizer(bpe)
    steps = [tokenizers.normalizers.Prepend("▁")] if prefix else []
    steps += [tokenizers.normalizers.Replace(" ", "▁")]
    model.normalizer = tokenizers.normalizers.Sequence(steps)
    model.add_special_tokens(list(special))
    return model


def unigram(*special: str) -> Any:
    """Return a unigram model of letters, as T5's."""
    names = [*special, "▁", *"abcdefghijklmnopqrstuvwxyz"]
    scores = [(name, -float(number)) for number, name in enumerate(names)]
    model = tokenizers.Tokenizer(tokenizers.models.Unigram(scores, unk_id=2))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    model.add_special_tokens(list(special))
    return model


def with_template(model: Any, template: str) -> Any:
    """Return a tokenizer whose post-processor frames a text, as in `<s> $A`."""
    special = [(name, model.token_to_id(name)) for name in template.split() if name != "$A"]
    model.post_processor = tokenizers.processors.TemplateProcessing(template, None, special)
    return model


@dataclasses.dataclass
class Folder:
    """Contents of a published folder."""

    model: Any
    tokenizer_config: Mapping[str, Any] | None = None
    config: Mapping[str, Any] | None = None
    generation_config: Mapping[str, Any] | None = None
    special_tokens_map: Mapping[str, Any] | None = None
    added_tokens: Mapping[str, int] | None = None

    def write(self, path: Path) -> str:
        """Write the files and return the path."""
        path.mkdir(parents=True, exist_ok=True)
        self.model.save(str(path / "tokenizer.json"))
        for field in dataclasses.fields(self)[1:]:
            if (content := getattr(self, field.name)) is not None:
                (path / f"{field.name}.json").write_text(json.dumps(content))
        return str(path)


def token(content: str) -> dict[str, Any]:
    options = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
    return {"__type": "AddedToken", "content": content, **options}


def folders() -> dict[str, Folder]:
    """Return folders with the declarations that each family publishes."""
    gpt2, chat, llama = (
        byte_level(END),
        byte_level(END, *CHAT),
        with_template(pieces(*LLAMA), "<s> $A"),
    )
    gpt2.post_processor = tokenizers.processors.ByteLevel(trim_offsets=False)
    llama_3 = byte_level(*LLAMA_3)
    start = with_template(byte_level(*LLAMA_3), f"{LLAMA_3[0]} $A").post_processor
    llama_3.post_processor = tokenizers.processors.Sequence([gpt2.post_processor, start])
    gemma = with_template(pieces("<pad>", "<eos>", "<bos>", "<unk>", prefix=False), "<bos> $A")
    t5 = with_template(unigram("<pad>", "</s>", "<unk>"), "$A </s>")
    gpt2_ids = {"model_type": "gpt2", "bos_token_id": 256, "eos_token_id": 256}
    llama_ids = {"model_type": "llama", "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
    of_llama = {
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": token("<s>"),
        "eos_token": token("</s>"),
        "pad_token": None,
        "tokenizer_class": "LlamaTokenizer",
        "unk_token": token("<unk>"),
    }
    of_qwen = {
        "add_bos_token": False,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": END,
        "tokenizer_class": "Qwen2Tokenizer",
    }
    of_smollm = {"bos_token": CHAT[0], "eos_token": CHAT[1], "tokenizer_class": "GPT2Tokenizer"}
    of_gemma = {
        "add_bos_token": True,
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "tokenizer_class": "GemmaTokenizer",
    }
    of_phi = {"bos_token": "<s>", "eos_token": END, "pad_token": END, "add_bos_token": False}
    listed = {str(number): {**token(name), "special": True} for number, name in ((256, END),)}
    return {
        "gpt2": Folder(gpt2, {"model_max_length": 1024}, gpt2_ids),
        "gpt2 without tokenizer_config.json": Folder(gpt2, None, gpt2_ids),
        "llama 1 and 2": Folder(llama, of_llama, llama_ids),
        "llama with special_tokens_map.json alone": Folder(
            llama, None, llama_ids, special_tokens_map={"bos_token": "<s>", "eos_token": "</s>"}
        ),
        "llama whose post-processor adds nothing": Folder(pieces(*LLAMA), of_llama, llama_ids),
        "llama of the class alone": Folder(
            llama, {"tokenizer_class": "LlamaTokenizerFast"}, llama_ids
        ),
        "llama 3": Folder(
            llama_3,
            {
                "bos_token": LLAMA_3[0],
                "eos_token": LLAMA_3[2],
                "tokenizer_class": "PreTrainedTokenizerFast",
            },
            {"model_type": "llama", "bos_token_id": 256, "eos_token_id": [257, 258]},
        ),
        "llama 3 that names the class of llama 2": Folder(
            llama_3, {"tokenizer_class": "LlamaTokenizer"}, {"model_type": "llama"}
        ),
        "mistral": Folder(llama, of_llama, {**llama_ids, "model_type": "mistral"}),
        "qwen2": Folder(chat, of_qwen, {"model_type": "qwen2", "bos_token_id": 256}),
        "qwen3 without tokenizer_config.json": Folder(
            chat, None, {"model_type": "qwen3", "bos_token_id": 256, "eos_token_id": 258}
        ),
        "gemma": Folder(gemma, of_gemma, {"model_type": "gemma"}),
        "gemma 2 without tokenizer_config.json": Folder(gemma, None, {"model_type": "gemma2"}),
        "phi 3": Folder(
            with_template(pieces(*LLAMA, END), "$A"),
            {**of_phi, "tokenizer_class": "LlamaTokenizer"},
            {"model_type": "phi3", "eos_token_id": 3},
        ),
        "olmo 2": Folder(
            byte_level(END, "<|pad|>"),
            {
                "bos_token": END,
                "eos_token": END,
                "pad_token": "<|pad|>",
                "tokenizer_class": "GPT2Tokenizer",
            },
            {"model_type": "olmo2"},
        ),
        "smollm 2": Folder(chat, {**of_smollm, "pad_token": CHAT[1]}, {"model_type": "llama"}),
        "special_tokens_map.json over tokenizer_config.json": Folder(
            chat,
            {**of_smollm, "eos_token": END},
            {"model_type": "llama"},
            special_tokens_map={"bos_token": END, "eos_token": {"content": CHAT[1]}},
        ),
        "added_tokens_decoder over special_tokens_map.json": Folder(
            chat,
            {**of_smollm, "eos_token": END, "added_tokens_decoder": listed},
            {"model_type": "llama"},
            special_tokens_map={"bos_token": END, "eos_token": {"content": CHAT[1]}},
        ),
        "tokens of added_tokens.json": Folder(
            gpt2,
            {"eos_token": "<new>", "tokenizer_class": "PreTrainedTokenizerFast"},
            {"model_type": "llama"},
            added_tokens={"<more>": 258, "<new>": 257},
        ),
        "padding that the vocabulary lacks": Folder(
            gpt2,
            {"eos_token": END, "pad_token": "[PAD]", "tokenizer_class": "PreTrainedTokenizerFast"},
            {"model_type": "llama"},
        ),
        "t5": Folder(t5, {"tokenizer_class": "T5Tokenizer"}, {"model_type": "t5"}),
    }


@pytest.mark.parametrize("name", folders())
def test_ids_of_a_folder_equal_those_of_auto_tokenizer(name, tmp_path):
    transformers = pytest.importorskip("transformers")
    path = folders()[name].write(tmp_path)
    auto = transformers.AutoTokenizer.from_pretrained(path)
    tokenizer = HuggingFaceTokenizer(path=path)
    declared = (auto.bos_token_id, auto.eos_token_id, auto.pad_token_id)
    assert tuple(tokenizer._roles.values()) == declared
    last = [tokenizer.eos_id] if name == "t5" else []
    for text in ("a few words", "a<new>b"):
        ids = tokenizer.encode(text)
        assert [*first_ids(ids, tokenizer), *ids, *last] == auto(text).input_ids
        if auto.eos_token_id is not None:
            assert framed([ids], tokenizer)[-1] == auto.eos_token_id


def test_tokens_that_only_the_model_or_the_post_processor_defines(tmp_path):
    ids = {"model_type": "llama", "bos_token_id": 1, "eos_token_id": [2, 0], "pad_token_id": -1}
    llama = with_template(pieces(*LLAMA), "<s> $A")
    for number, files in enumerate(({"config": ids}, {"generation_config": ids})):
        model = HuggingFaceTokenizer(path=Folder(llama, **files).write(tmp_path / str(number)))
        assert (model.start_id, model.bos_id, model.eos_id) == (1, 1, 2)
        assert end_ids(model) == (2, 0)
    alone = HuggingFaceTokenizer(path=Folder(llama).write(tmp_path / "alone"))
    assert (alone.start_id, alone.eos_id, alone.pad_id) == (1, None, 0)
    bert = with_template(unigram("[CLS]", "[SEP]", "<unk>"), "[CLS] $A [SEP]")
    framed_by_file = HuggingFaceTokenizer(path=Folder(bert).write(tmp_path / "bert"))
    assert framed([framed_by_file.encode("a")], framed_by_file).tolist() == [0, 3, 4, 1]


def test_start_token_is_a_field_and_never_comes_twice(raises, tmp_path):
    path = Folder(byte_level(END, *CHAT), {"bos_token": CHAT[0], "eos_token": CHAT[1]}).write(
        tmp_path
    )
    without, with_start = (HuggingFaceTokenizer(path=path, add_bos_token=a) for a in (None, True))
    plain, chat = without.encode("a"), without.encode(f"{CHAT[0]}a{CHAT[1]}")
    assert framed([plain], without).tolist() == [*plain, 258]
    assert framed([plain], with_start).tolist() == [257, *plain, 258]
    for tokenizer in (without, with_start):
        assert framed([chat], tokenizer).tolist() == [257, *plain, 258]
        assert tokenizer.start_id == 257
    assert without.fingerprint() != with_start.fingerprint()
    nothing = Folder(byte_level()).write(tmp_path / "nothing")
    with raises(ConfigError, field="bos_token"):
        _ = HuggingFaceTokenizer(path=nothing, add_bos_token=True).start_id
    several = with_template(byte_level(*CHAT), f"{CHAT[0]} {CHAT[1]} $A")
    several = HuggingFaceTokenizer(path=Folder(several).write(tmp_path / "several"))
    with raises(ConfigError, owner="HuggingFaceTokenizer", value=CHAT):
        _ = several.start_id


@pytest.mark.parametrize("text", ["ab", f"{CHAT[0]}ab"])
def test_rows_prompts_and_records_begin_and_end_alike(tmp_path, text):
    path = Folder(byte_level(END, *CHAT), {"eos_token": END, "bos_token": CHAT[0]}).write(tmp_path)
    for name, add_bos_token in (("none", None), ("start", True)):
        tokenizer = HuggingFaceTokenizer(path=path, add_bos_token=add_bos_token)
        expected = tokenizer.encode(text).tolist()
        if add_bos_token and not text.startswith(CHAT[0]):
            expected = [257, *expected]
        expected = [*expected, 256]
        file = tmp_path / name / "a.txt"
        file.parent.mkdir()
        file.write_text(text)
        fields = {"batch_size": 1, "paths": [str(file)], "split": "all", "tokenizer": tokenizer}
        row = LocalText(seq_length=8, **fields).get_next()
        size = int(row.weights.sum())
        assert [*row.ids[0, :size], row.labels[0, size - 1]] == expected
        prompt = LocalTextPrompts(prompt_length=8, **fields).get_next()
        assert prompt.ids[0, : prompt.prompt_lengths[0]].tolist() == expected[:-1]
        packer = StreamPacker(8, bos_id=None)
        packer.add(expected)
        packer.finish()
        assert packer.take().ids[:size].tolist() == expected[:-1]
        if add_bos_token is None:  # The command has no field for it.
            about = build_token_records([str(file)], tmp_path / f"rec-{name}", tokenizer=path)
            stored = about.tokenizer
            assert (stored["start_id"], stored["eos_id"], stored["pad_id"]) == (None, 256, 256)
            records = TokenRecords(batch_size=1, path=str(tmp_path / f"rec-{name}"), seq_length=8)
            np.testing.assert_array_equal(records.get_next().labels[0, :size], row.labels[0, :size])
            assert records.special_ids() == (None, 256, 256)


@pytest.mark.parametrize("bos_token", [CHAT[0], None])
def test_prompt_of_an_empty_document_is_the_start_token(tmp_path, bos_token):
    declared = {"eos_token": END, "bos_token": bos_token}
    path = Folder(byte_level(END, *CHAT), declared).write(tmp_path / "model")
    tokenizer = HuggingFaceTokenizer(path=path)
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "a"}\n{"text": ""}\n')
    fields = {"paths": [str(file)], "text_field": "text", "split": "all", "tokenizer": tokenizer}
    batch = LocalTextPrompts(batch_size=2, prompt_length=4, **fields).get_next()
    assert batch.prompt_lengths.tolist() == [1, 1]
    assert batch.ids[:, 0].tolist() == [*tokenizer.encode("a"), 257 if bos_token else 256]
    assert batch.paddings.sum(axis=1).tolist() == [3, 3]
    pytest.importorskip("datasets")
    file.write_text('{"q": "", "a": "b"}\n{"q": "a", "a": "b"}\n')
    fields = {"path": "json", "data_files": str(file), "cache_dir": str(tmp_path / "cache")}
    fields |= {"batch_size": 2, "inputs_field": "q", "text_field": "a", "tokenizer": tokenizer}
    prompts = HuggingFacePrompts(prompt_length=4, **fields).get_next()
    assert prompts.ids[:, 0].tolist() == batch.ids[::-1, 0].tolist()
    assert prompts.prompt_lengths.tolist() == [1, 1]
    rows = HuggingFaceInput(seq_length=4, packing="none", **fields).get_next()
    np.testing.assert_array_equal(rows.ids[:, 0], prompts.ids[:, 0])
    assert rows.weights.tolist() == [[1, 1, 0, 0]] * 2


def test_inputs_without_start_are_read_and_not_scored():
    batch = lm_features([[5, 6]], [[7, 8]], length=4, bos_id=None, weights_on_targets_only=True)
    assert batch.ids.tolist()[0][:3] == [5, 6, 7] and batch.labels.tolist()[0][:3] == [6, 7, 8]
    assert batch.weights.tolist() == [[0, 1, 1, 0]]
    assert batch.inputs_indicator.tolist() == [[1, 1, 0, 0]]


def test_folder_of_a_sentencepiece_model_declares_its_tokens(raises, sentencepiece_file, tmp_path):
    path = tmp_path / "tokenizer.model"
    path.write_bytes(Path(sentencepiece_file).read_bytes())
    alone = SentencePieceTokenizer(path=str(path))
    assert (alone.start_id, alone.eos_id, alone.pad_id) == (0, 1, 0)
    declared = {
        "bos_token": "</s>",
        "eos_token": "<end>",
        "pad_token": None,
        "add_bos_token": True,
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(declared))
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<end>": 60}))
    folder = SentencePieceTokenizer(path=str(path))
    assert (folder.start_id, folder.eos_id, folder.pad_id, folder.vocab_size) == (1, 60, 60, 61)
    assert folder.decode([1, *folder.encode("some text"), 60]) == "some text"
    assert folder.fingerprint() != alone.fingerprint()
    (tmp_path / "tokenizer_config.json").write_text('{"add_bos_token": false}')
    assert prefix_id(SentencePieceTokenizer(path=str(path))) is None
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<stop>"}')
    with raises(ConfigError, field="eos_token", value="<stop>"):
        _ = SentencePieceTokenizer(path=str(path)).eos_id


def test_end_tokens_that_disagree_are_reported(tmp_path):
    model = byte_level(END, *CHAT)
    ids = {"config": {"eos_token_id": 256}, "generation_config": {"eos_token_id": [258, 256]}}
    path = Folder(model, {"eos_token": CHAT[1]}, **ids).write(tmp_path)
    tokenizer = HuggingFaceTokenizer(path=path)
    assert (tokenizer.eos_id, end_ids(tokenizer)) == (258, (258, 256))
    assert end_disagreement(tokenizer, [256, 258]) == (
        "training ends a text with <|im_end|> (258); all of these end decoding: tokenizer 258;"
        " config.json 256; generation_config.json 258, 256; decoder 256, 258"
    )
    agree = Folder(model, {"eos_token": END}, config={"eos_token_id": 256}).write(
        tmp_path / "agree"
    )
    assert end_disagreement(HuggingFaceTokenizer(path=agree), [256]) is None
