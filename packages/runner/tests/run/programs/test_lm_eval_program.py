"""Scores on tasks of lm-evaluation-harness: those of its backend `hf`, in training too."""

from __future__ import annotations

import dataclasses
import json
import random
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import layerkit_runner
from layerkit.config import Config
from layerkit.errors import UserError, pip_install
from layerkit_inputs.chat.template import load_chat_template
from layerkit_runner import cli
from layerkit_runner.observers import read_metrics
from layerkit_runner.run.inference import run_inference
from layerkit_runner.run.model.harness import HarnessModel
from layerkit_runner.run.programs.lm_eval_program import LmEvalProgram, lm_eval_programs, load_tasks
from layerkit_runner.run.resolve import resolve
from layerkit_runner.run.training_run import run_train
from layerkit_runner.run_options import RunOptions

WORDS = ["cat", "dog", "bird", "tree", "house", "mat", "red", "blue", "green", "the", "what", "is"]
TASKS = ("tiny_choice", "tiny_last", "tiny_text", "tiny_answer")
MEAN = {"aggregation": "mean", "higher_is_better": True}
# lm-eval leaves files to the garbage collector, and asks about Python's newer paths.
pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(scope="module")
def lines() -> ModuleType:
    """The module of an experiment on the bytes of lines."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "interface"))
        import lines_experiment

        return lines_experiment


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a task of each kind, on twelve documents."""
    folder = tmp_path_factory.mktemp("tasks")
    rng = random.Random(0)
    rows = []
    for _ in range(12):
        thing, choices = rng.choice(WORDS[:6]), rng.sample(WORDS[6:9], 3)
        text = f"the {thing} sat on the mat . " * rng.choice([1, 1, 5])
        row = {"question": f"what is the {thing} ?", "choices": choices, "text": text}
        row["start"] = f"the {thing} sat on the mat . it is the"
        rows.append(row | {"answer": rng.randrange(3), "last": rng.choice(WORDS)})
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    base = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}}
    base |= {"test_split": "test", "fewshot_split": "test", "metadata": {"version": 1.0}}
    question = "Question: {{question}} Answer:"
    kinds: dict[str, dict[str, Any]] = {
        "tiny_choice": {
            "output_type": "multiple_choice",
            "doc_to_text": question,
            "doc_to_choice": "{{choices}}",
            "doc_to_target": "answer",
            "metric_list": [{"metric": "acc", **MEAN}, {"metric": "acc_norm", **MEAN}],
        },
        "tiny_last": {
            "output_type": "loglikelihood",
            "doc_to_text": "{{start}}",
            "doc_to_target": " {{last}}",
            "num_fewshot": 0,
            "metric_list": [
                {"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False},
                {"metric": "acc", **MEAN},
            ],
        },
        "tiny_text": {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{text}}",
            "metric_list": [
                {"metric": name} for name in ("word_perplexity", "byte_perplexity", "bits_per_byte")
            ],
        },
        "tiny_answer": {
            "output_type": "generate_until",
            "doc_to_text": question,
            "doc_to_target": "the {{last}}",
            "generation_kwargs": {"until": ["\n", " red"], "max_gen_toks": 12},
            "metric_list": [
                {"metric": "exact_match", **MEAN},
                {"metric": "chrf", "aggregation": "chrf", "higher_is_better": True},
            ],
        },
    }
    for name, kind in kinds.items():
        (folder / f"{name}.yaml").write_text(json.dumps({"task": name, **base, **kind}))
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a Llama of transformers that has learned some sentences."""
    torch, transformers = map(pytest.importorskip, ("torch", "transformers"))
    import tokenizers as hf

    texts = [f"Question: what is the {word} ? Answer: {word} red\n" for word in WORDS]
    texts += [f"the {a} sat on the mat . it is the {b}" for a in WORDS[:6] for b in WORDS]
    texts += [f"the {word} sat on the mat . " * 5 for word in WORDS[:6]]
    tokens = hf.Tokenizer(hf.models.BPE())
    tokens.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = hf.decoders.ByteLevel()
    trainer = hf.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=hf.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokens.train_from_iterator(texts, trainer)
    tokens.post_processor = hf.processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 0)]
    )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokens, bos_token="<s>", eos_token="</s>"
    )
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<s>' if loop.first else '' }}{{ m.role }}: {{ m.content }}\n"
        "{% endfor %}{{ 'assistant:' if add_generation_prompt else '' }}"
    )
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    ends = {"bos_token_id": 0, "eos_token_id": 1, "vocab_size": 300}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads, **ends))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for text in texts:
        ids = torch.tensor([[*tokenizer(text)["input_ids"], 1]])
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    folder = tmp_path_factory.mktemp("llama")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("names", "chat", "flags"),
    [
        (TASKS, False, []),
        (("tiny_choice", "tiny_answer"), True, ["--apply_chat_template=true", "--limit=8"]),
        (TASKS[:3], False, ["--fdl.partitioner.ici_mesh_shape=[1,4,2]", "--batch_size=4"]),
    ],
    ids=["plain", "chat", "sharded"],
)
def test_scores_equal_those_of_the_backend_hf(
    names: tuple[str, ...],
    chat: bool,
    flags: list[str],
    llama: Path,
    tasks: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    pytest.importorskip("lm_eval")
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.utils import make_table

    seeds = ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed")
    expected = simple_evaluate(
        HFLM(pretrained=str(llama), dtype="float32", device="cpu", batch_size=4),
        tasks=load_tasks(names, str(tasks), 64),
        num_fewshot=1,
        limit=8 if chat else None,
        apply_chat_template=chat,
        **dict.fromkeys(seeds, 3),
    )
    command = ["--mode=lm_eval", f"--init_from={llama}", f"--job_log_dir={tmp_path}", "--seed=3"]
    command += [f"--tasks={','.join(names)}", f"--include_path={tasks}", "--num_fewshot=1"]
    assert cli.main([*command, "--fdl.DTYPE=float32", *flags]) == 0
    shown = capsys.readouterr().out
    written = json.loads((tmp_path / "eval/lm_eval/results_00000000.json").read_text())
    assert written["n-samples"] == expected["n-samples"]
    assert make_table(written) in shown
    (logged,) = read_metrics(tmp_path / "metrics_lm_eval.jsonl").evals["lm_eval"]
    for task, values in expected["results"].items():
        for key, value in values.items():
            if "," in key and value != "N/A":
                # The tables print four digits after the point; float32 has seven.
                close = pytest.approx(value, rel=1e-6, abs=5e-5)
                assert logged[f"{task}/{key.partition(',')[0]}"] == close
    assert logged["tiny_choice/n"] == (8 if chat else 12)
    assert (tmp_path / "summaries/eval_test_lm_eval").is_dir()


def test_scores_in_training_equal_those_of_its_checkpoint(
    tasks: Path, tmp_path: Path, lines: Any, raises: Any
):
    pytest.importorskip("lm_eval")

    class Scored(lines.LinesLm):
        def lm_eval_tasks(self) -> list[Config]:
            options = {"include_path": str(tasks), "max_length": 40, "limit": 5}
            names = ["tiny_choice", "tiny_text", "tiny_answer"]
            return [Config(LmEvalProgram, tasks=names, interval_steps=2, **options)]

    resolved, options = resolve(Scored()), RunOptions(job_log_dir=str(tmp_path))
    assert run_train(resolved, options, quiet=True) == 0
    rows = read_metrics(tmp_path / "metrics.jsonl").evals["lm_eval"]
    assert [row["step"] for row in rows] == [2, 4]
    assert run_inference("lm_eval", resolved, options) == 0
    (again,) = read_metrics(tmp_path / "metrics_lm_eval.jsonl").evals["lm_eval"]
    assert rows[1] | {"time": 0} == again | {"time": 0}
    resolved = dataclasses.replace(resolved, lm_eval_tasks=2 * resolved.lm_eval_tasks)
    with raises(UserError, owner="lm_eval_tasks", field="name", value=["lm_eval"]):
        run_inference("lm_eval", resolved, options)


@pytest.mark.parametrize(("flag", "seed"), [(None, 5), (0, 0), (3, 3)])
def test_seed_of_the_flag_replaces_that_of_the_program(flag: int | None, seed: int):
    class Noted(LmEvalProgram):
        def __init__(self, job: Any, tasks: Any, *, seed: int) -> None:
            self.name, self.seed = "noted", seed

    job: Any = SimpleNamespace(options=RunOptions(seed=flag), resolved=SimpleNamespace())
    job.resolved.lm_eval_tasks = [Config(Noted, tasks=["a"], seed=5)]
    (program,) = lm_eval_programs(job)
    assert program.seed == seed  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--tasks=tiny_choise"], {"field": "tasks", "value": "tiny_choise"}),
        (["--tasks=a", "--include_path=nowhere"], {"field": "include_path", "value": "nowhere"}),
        ([], {"field": "--tasks"}),
        (["--tasks=tiny_answer", "--max_length=12"], {"field": "max_length", "value": 12}),
        (["--tasks=tiny_text", "--apply_chat_template=x"], {"field": "chat_template"}),
        (["--tasks=tiny_text", "--exp=lm.X"], {"field": "--init_from"}),
    ],
)
def test_flags_are_checked(
    flags: list[str], error: dict[str, Any], llama: Path, tasks: Path, tmp_path: Path, raises: Any
):
    pytest.importorskip("lm_eval")
    command = ["--mode=lm_eval", f"--init_from={llama}", f"--job_log_dir={tmp_path}"]
    command += [] if "--include_path=nowhere" in flags else [f"--include_path={tasks}"]
    with raises(UserError, **error):
        cli._run([*command, *flags])
    assert not [*tmp_path.glob("metrics*")]


def test_ends_of_messages_and_tokens_are_those_of_transformers(llama: Path):
    transformers = pytest.importorskip("transformers")
    model = layerkit_runner.load(str(llama))
    template = load_chat_template(None, model.tokenizer)
    harness = HarnessModel(model, 64, 4, template, 0)
    tokens = transformers.AutoTokenizer.from_pretrained(llama)
    for content in ("e", "a", "it is:\n", "the  "):
        chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": content}]
        expected = tokens.apply_chat_template(chat, tokenize=False, continue_final_message=True)
        assert harness.apply_chat_template(chat, add_generation_prompt=False) == expected
    (ids,) = model.generate_ids([tokens("the cat")["input_ids"]], max_new_tokens=8, temperature=0)
    options = {"max_new_tokens": 8, "temperature": 0, "ends": (int(ids[2]),)}
    (ended,) = model.generate_ids([tokens("the cat")["input_ids"]], **options)
    assert ended.tolist() == ids[: ids.tolist().index(ids[2]) + 1].tolist()


def test_missing_harness_is_reported(monkeypatch: pytest.MonkeyPatch, raises: Any):
    for module in ("lm_eval", "lm_eval.tasks"):
        monkeypatch.setitem(sys.modules, module, None)
    with raises(UserError, hint=f"Install it: {pip_install('layerkit-runner', 'eval')}"):
        load_tasks(["a"], None, 64)
