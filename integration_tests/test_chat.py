"""A small Llama in a Hugging Face folder, tuned on conversations by three commands."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import layerkit_runner
from layerkit_runner import cli

os.environ.setdefault("HF_HUB_OFFLINE", "1")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% if message.role == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
WORDS = [f"{n}" for n in range(10)] + ["what", "comes", "after", "comes:", "ok"]
QUESTIONS = {n: f"what comes after {n}" for n in range(9)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a small Llama with random weights, and a tokenizer of words with a chat template."""
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("llama")
    special = ["<pad>", "<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
    vocabulary = {word: number for number, word in enumerate([*special, *WORDS])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(special)
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    wrapped.chat_template = {"default": TEMPLATE, "tool_use": f"{TEMPLATE}{{# tools #}}"}
    wrapped.save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=64, bos_token_id=1, eos_token_id=2,
        initializer_range=0.2,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def conversations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("chat") / "chat.jsonl"
    rows = [
        {"messages": [
            {"role": "user", "content": QUESTIONS[n]},
            {"role": "assistant", "content": f"after {n} comes: {n + 1}"},
            {"role": "user", "content": QUESTIONS[m]},
            {"role": "assistant", "content": f"after {m} comes: {m + 1}"},
        ]}
        for n in QUESTIONS for m in QUESTIONS
    ]  # fmt: skip
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def words_of(folder: Path, conversations: Path, job: Path, name: str = "Chat") -> list[str]:
    return [
        *(f"--exp=lm.sft.{name}", f"--fdl.HF_FOLDER={folder}"),
        *(f"--fdl.CHAT_FILES=['{conversations}']", f"--job_log_dir={job}"),
        *("--fdl.MAX_SEQ_LEN=48", "--fdl.PERCORE_BATCH_SIZE=1", "--fdl.FPROP_DTYPE=float32"),
        *("--fdl.MAX_STEPS=120", "--fdl.WARMUP_STEPS=5", "--fdl.LEARNING_RATE=1e-2"),
        *("--fdl.EVAL_INTERVAL_STEPS=None", "--fdl.NUM_PROMPTS=8", "--fdl.PROMPT_LENGTH=32"),
        *("--fdl.MAX_DECODE_STEPS=16", "--fdl.CHECKPOINT_EVERY_N_STEPS=60"),
        "--fdl.task.train.eval_at_end=False",
    ]


def answer_of(folder: Path, adapter: Path | None = None) -> str:
    """Return the answer of transformers, with the tokenizer and the template of the folder."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    if adapter is not None:
        model = pytest.importorskip("peft").PeftModel.from_pretrained(model, adapter)
    question = [{"role": "user", "content": QUESTIONS[5]}]
    ids = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    new = model.eval().generate(**ids, max_new_tokens=12, do_sample=False)
    return tokenizer.decode(new[0, ids["input_ids"].shape[1] :])


def test_three_commands_from_a_folder_to_a_folder_that_answers(
    folder: Path, conversations: Path, tmp_path: Path, capsys: Any, monkeypatch: Any
):
    job, exported = tmp_path / "job", tmp_path / "exported"
    assert cli.main(words_of(folder, conversations, job)) == 0
    assert cli.main([f"--job_log_dir={job}", "--mode=export", f"--export_dir={exported}"]) == 0
    assert "comes" not in answer_of(folder)
    # It ends with the turn, not with the end token of the folder.
    assert answer_of(exported) == "after 5 comes: 6 <|end|>"
    capsys.readouterr()
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{QUESTIONS[3]}\n{QUESTIONS[7]}\n"))
    assert cli.main([f"--job_log_dir={job}", "--mode=generate", "--chat", "--temperature=0"]) == 0
    assert capsys.readouterr().out == "after 3 comes: 4\nafter 7 comes: 8\n"
    templates = [
        transformers.AutoTokenizer.from_pretrained(path).chat_template
        for path in (folder, exported)
    ]
    assert templates[0] == templates[1]
    assert set(templates[0]) == {"default", "tool_use"}
    prompt = ["--chat", f"--prompt={QUESTIONS[2]}", "--temperature=0"]
    assert cli.main([f"--init_from={exported}", "--mode=generate", *prompt]) == 0
    assert capsys.readouterr().out == "after 2 comes: 3\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "fields", "flags"),
    [
        ("ChatLora", [], ["--adapters_only"]),
        # Beside other weights, those in floats, PEFT would compute something else.
        ("ChatQlora", ["--fdl.WEIGHT_FORMAT=nf4:8"], []),
    ],
)
def test_exported_adapters_compute_the_same_elsewhere(
    name: str,
    fields: list[str],
    flags: list[str],
    folder: Path,
    conversations: Path,
    tmp_path: Path,
):
    job, target = tmp_path / "job", tmp_path / "target"
    assert cli.main([*words_of(folder, conversations, job, name), *fields]) == 0
    export = [f"--job_log_dir={job}", "--mode=export", f"--export_dir={target}", *flags]
    assert cli.main(export) == 0
    base = folder if flags else target
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype="float32")
    if flags:
        model = pytest.importorskip("peft").PeftModel.from_pretrained(model, target)
        assert answer_of(folder, target).startswith("after 5 comes: 6 <|end|>")
    ids = [[1, 4, 10, 11, 5, 12]]
    with torch.no_grad():
        expected = model.eval()(torch.tensor(ids)).logits.numpy()
    actual = layerkit_runner.load(job).logits(ids)
    assert np.abs(actual - expected).max() < 1e-5 * np.abs(expected).max()


@pytest.mark.slow
def test_run_killed_inside_a_save_equals_an_uninterrupted_run(
    jobs: Any, folder: Path, conversations: Path, tmp_path: Path, running: list[Any]
):
    fields = {"HF_FOLDER": folder, "CHAT_FILES": f"['{conversations}']", "MAX_SEQ_LEN": 48}
    fields |= {"PERCORE_BATCH_SIZE": 2, "MAX_STEPS": 8, "CHECKPOINT_EVERY_N_STEPS": 2}
    fields |= {"MAX_DECODE_STEPS": 16, "PROMPT_LENGTH": 32}
    whole, job = (
        jobs.make("lm.sft.ChatLora", tmp_path / name, **fields) for name in ("whole", "job")
    )
    whole.run()
    process = job.start()
    running.append(process)
    assert job.wait_for(process, job.steps_saved)
    jobs.kill_inside_a_save(job, process)
    assert "resuming from step" in job.run()
    jobs.assert_same_bits(jobs.read_checkpoint(job, 8), jobs.read_checkpoint(whole, 8))
