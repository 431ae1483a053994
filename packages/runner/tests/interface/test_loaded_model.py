"""A loaded model: its tokens, scores and logits against the modes and plain loops."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import jax
import numpy as np
import pytest

import layerkit_runner
from layerkit.errors import UserError
from layerkit_inputs import ByteTokenizer
from layerkit_runner import LoadedModel, TrainResult, cli
from layerkit_runner.run.job import build_parts
from layerkit_runner.run.model.generation import Buckets, NoTokenizerError, find_tokenizer
from layerkit_runner.run.resolve import resolve

PROMPTS = ["im", "def ", "re"]


def test_greedy_text_equals_the_decode_mode_and_a_loop_without_a_cache(
    run: TrainResult, model: LoadedModel
):
    (path,) = (Path(run.job_log_dir) / "decode/prompts").glob("*.jsonl")
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [record["prompt"] for record in records] == PROMPTS
    assert model.generate(PROMPTS) == [record["continuation"] for record in records]
    ids = [1, *model.tokenizer.encode(PROMPTS[0])]
    expected: list[int] = []
    while len(expected) < 6 and 2 not in expected:
        expected.append(int(np.argmax(model.logits([*ids, *expected])[-1])))
    (result,) = model.generate_ids([ids])
    assert result.tolist() == expected


def test_streamed_pieces_are_the_text_and_rows_are_independent(model: LoadedModel):
    pieces: dict[int, str] = {0: "", 1: ""}
    arguments: dict[str, Any] = {"temperature": 1.5, "top_k": 50, "top_p": 0.9, "seed": 3}
    texts = model.generate(
        PROMPTS[:2],
        **arguments,
        stream=lambda row, piece: pieces.update({row: pieces[row] + piece}),
    )
    assert list(pieces.values()) == texts
    assert model.generate(PROMPTS[0], **arguments) == texts[:1]
    assert model.generate(PROMPTS[:2], **{**arguments, "seed": 4}) != texts


def test_samples_of_a_prompt_do_not_depend_on_its_place(model: LoadedModel):
    options: dict[str, Any] = {"temperature": 1.5, "seed": 3}
    (alone,) = model.generate("def ", **options)
    _, second, _, repeated = model.generate(["im", "def ", "re", "def "], **options)
    assert second == alone != repeated


def test_experiment_may_give_the_tokenizer_of_readers_of_ids(lines: ModuleType):
    class OfIds(lines.LinesLm):
        """An experiment whose readers have no tokenizer."""

        def datasets(self) -> list[Any]:
            reader = lines.PromptLines.HParams
            return [reader.config(name=n, batch_size=8, is_training=n == "train") for n in "ab"]

    class OfBytes(OfIds):
        """An experiment that has one."""

        def tokenizer(self) -> Any:
            return ByteTokenizer.HParams.config()

    resolved = resolve(OfIds())
    partitioner, _ = build_parts(resolved)
    partitioner.start(jax.devices()[:1])
    with pytest.raises(NoTokenizerError):
        find_tokenizer(resolved, partitioner)
    assert isinstance(find_tokenizer(resolve(OfBytes()), partitioner), ByteTokenizer)


def test_scores_equal_the_evaluation_and_the_logits(
    run: TrainResult, model: LoadedModel, lines: ModuleType
):
    scores = model.score(lines.LINES)
    xent = -sum(s.log_likelihood for s in scores) / sum(s.num_tokens for s in scores)
    assert xent == pytest.approx(run.evaluations["heldout"]["xent"][-1], rel=1e-5)
    assert xent == pytest.approx(model.evaluate()["heldout"]["xent"], rel=1e-5)
    (score,) = model.score("x", prompts=["def "])
    before = [1, *model.tokenizer.encode("def ")]
    expected = jax.nn.log_softmax(model.logits(before)[-1])[model.tokenizer.encode("x")[0]]
    assert score.token_log_probs == pytest.approx([float(expected)], rel=1e-5)


@pytest.mark.slow
def test_weights_are_sharded_as_the_partitioner_says(run: TrainResult, model: LoadedModel):
    overrides = {"partitioner.ici_mesh_shape": [1, 4, 2]}
    sharded = layerkit_runner.load(run.job_log_dir, overrides=overrides)
    spread = {len(leaf.sharding.device_set) for leaf in jax.tree.leaves(sharded.weights)}
    assert spread == {8}
    parts = [leaf.addressable_shards[0].data.size for leaf in jax.tree.leaves(sharded.weights)]
    assert sum(parts) < sum(leaf.size for leaf in jax.tree.leaves(sharded.weights))
    ids = np.array([[1, 5, 9], [1, 7, 8]])
    np.testing.assert_allclose(sharded.logits(ids), model.logits(ids), atol=1e-5)
    assert sharded.generate(PROMPTS) == model.generate(PROMPTS)


def test_compiled_functions_are_shared_by_sizes_of_one_bucket():
    buckets = Buckets(row_multiple=2, max_positions=100)
    assert [buckets.rows(n) for n in (1, 2, 3, 9)] == [2, 2, 4, 16]
    assert [buckets.length(n) for n in (1, 17, 70, 101)] == [16, 32, 100, 101]
    assert buckets.prompt_and_steps(5, 5) == (16, 16)
    assert buckets.prompt_and_steps(60, 34) == (64, 36)
    assert buckets.prompt_and_steps(70, 30) == (70, 30)


def test_arrays_of_ids_are_rows_and_ids_outside_the_vocabulary_are_errors(
    raises: Any, model: LoadedModel
):
    rows = np.array([[1, 5, 9], [1, 7, 8]])
    lists = rows.tolist()
    for call in (model.generate_ids, lambda ids: [s.token_log_probs for s in model.score_ids(ids)]):
        for result, expected in zip(call(rows), call(lists), strict=True):
            np.testing.assert_array_equal(result, expected)
    wrong: Any = [5, 6]
    for call in (model.generate_ids, model.score_ids):
        with raises(UserError, value=259):
            call([[1], [259]])
        with pytest.raises(UserError):
            call(wrong)
    with raises(UserError, field="ids", value=-1):
        model.logits([-1, 3])
    with raises(UserError, field="prompts", value=1):
        model.score_ids([[5], [6]], prompts=[[7]])


@pytest.mark.slow
def test_config_that_was_edited_in_python_must_be_given_to_load(
    raises: Any, lines: ModuleType, tmp_path: Path
):
    edited = layerkit_runner.get_experiment(lines.LinesLm)
    edited.task.model.lm_tpl.num_layers = 2
    folder = tmp_path / "job"
    run = layerkit_runner.train(edited, job_log_dir=folder, num_steps=1)
    assert run.model.config.lm_tpl.num_layers == 2
    with raises(UserError, field="experiment"):
        layerkit_runner.load(folder)
    with raises(UserError, field="experiment"):  # No override gives the edit.
        layerkit_runner.load(folder, overrides={"partitioner.ici_mesh_shape": [1, 1, 1]})
    given = layerkit_runner.load(folder, overrides={"task.model.lm_tpl.num_layers": 2})
    assert given.config.lm_tpl.num_layers == 2
    assert layerkit_runner.load(folder, experiment=edited).config.lm_tpl.num_layers == 2


@pytest.mark.slow
def test_command_generates_the_same_text(
    run: TrainResult, model: LoadedModel, capsys: pytest.CaptureFixture[str]
):
    words = ["--mode=generate", f"--job_log_dir={run.job_log_dir}", "--max_new_tokens=5"]
    assert cli.main([*words, f"--prompt={PROMPTS[0]}"]) == 0
    assert capsys.readouterr().out == model.generate(PROMPTS[0], max_new_tokens=5)[0] + "\n"


def test_dialog_of_the_command_continues_each_line(
    run: TrainResult,
    model: LoadedModel,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    typed = Mock(side_effect=[*PROMPTS, EOFError])
    monkeypatch.setattr("builtins.input", typed)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    words = ["--mode=generate", f"--job_log_dir={run.job_log_dir}", "--temperature=1.5"]
    assert cli.main(words) == 0
    expected = model.generate(PROMPTS, temperature=1.5)
    assert capsys.readouterr().out == "\n".join(expected) + "\n\n"


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_standard_input_that_is_not_utf8_is_an_error_of_one_line(
    run: TrainResult,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    errors: str,
):
    piped = io.TextIOWrapper(io.BytesIO(b"caf\xe9"), encoding="utf-8", errors=errors)
    monkeypatch.setattr("sys.stdin", piped)
    assert cli.main(["--mode=generate", f"--job_log_dir={run.job_log_dir}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "standard input='\\udce9'. Expected text in UTF-8; character 3 is none" in line


@pytest.mark.parametrize(
    ("method", "arguments", "field"),
    [
        ("generate", {"prompts": ["a", 5]}, "prompts[1]"),
        ("generate", {"prompts": "a\ud800"}, "prompts"),
        ("generate", {"prompts": "a", "temperature": float("nan")}, "temperature"),
        ("generate", {"prompts": "a", "top_p": 1.5}, "top_p"),
        ("generate", {"prompts": "a", "max_new_tokens": 0}, "max_new_tokens"),
        ("generate_ids", {"prompts": [[[1, 2], [3]]]}, "prompts[0]"),
        ("score", {"texts": ["x", "y"], "prompts": "ab"}, "prompts"),
        ("score_ids", {"ids": [[5]], "start_id": 10**6}, "start_id"),
        ("logits", {"ids": [[1, 2], [3]]}, "ids"),
    ],
)
def test_invalid_arguments_are_errors_of_one_sentence(
    raises: Any, model: LoadedModel, method: str, arguments: dict[str, Any], field: str
):
    with raises(UserError, field=field):
        getattr(model, method)(**arguments)
