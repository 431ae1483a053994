"""The code on pages that promise to be run, run in the order in which a reader meets it."""

from __future__ import annotations

import inspect
import json
import re
import shlex
import sys
import types
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layerkit.base.sharding import DEFAULT_RULES
from layerkit.config.nested_map import NestedMap
from layerkit.errors import UserError
from layerkit_runner import BaseExperiment, cli
from layerkit_runner.config.config_tree import config_text
from layerkit_runner.observers import read_metrics
from layerkit_runner.run.resolve import resolve
from layerkit_runner.tools.translate import __main__ as translate

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGES = [
    "add_input.md",
    "add_observer.md",
    "add_optimizer.md",
    "data_sets.md",
    "hyperparameters.md",
    "init_from.md",
    "inputs.md",
    "observing.md",
    "optimization.md",
    "preferences.md",
    "programs.md",
    "shared_weights.md",
    "stages.md",
    # Longer: each compiles a model.
    *(
        pytest.param(page, marks=pytest.mark.slow)
        for page in (
            "add_attention_variant.md",
            "first_layer.md",
            "models_and_losses.md",
            "recurrent.md",
            "tasks_and_learners.md",
            "transformers.md",
            "vision.md",
        )
    ),
]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
COMMANDS = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES)
def test_the_code_of_a_page_runs(page: str, monkeypatch: pytest.MonkeyPatch):
    text = (DOCS / page).read_text()
    module = types.ModuleType("documented")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # where dataclasses look
    names = vars(module)
    blocks = list(BLOCK.finditer(text))
    assert blocks
    for block in blocks:
        # Lines are counted as on the page, so that a failure names the place.
        blank = "\n" * text[: block.start(1)].count("\n")
        exec(compile(blank + block[1], str(DOCS / page), "exec"), names)
    # Experiments are made as well, since their methods may ask for what is not there.
    own = [value for value in names.values() if getattr(value, "__module__", None) == "documented"]
    for cls in filter(inspect.isclass, own):
        if issubclass(cls, BaseExperiment) and cls.task is not BaseExperiment.task:
            made = cls()
            resolve(made)
            made.start_notes()


def test_the_code_of_a_gallery_task_trains_and_checks_its_result(monkeypatch: pytest.MonkeyPatch):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    shown: list[int] = []
    monkeypatch.setattr(pyplot, "show", lambda: shown.append(pyplot.gcf().number))
    cells = json.loads((DOCS / "gallery" / "csv_regression.ipynb").read_text())["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    for whole, smoke in (
        ("MAX_STEPS = 2500", "MAX_STEPS = 100"),
        ("EVAL_INTERVAL_STEPS = 500", "EVAL_INTERVAL_STEPS = None"),
        ("percore_batch_size=256", "percore_batch_size=64"),
        ("240", "24"),
        ("> 0.9", "> 0.3"),
    ):
        assert whole in code
        code = code.replace(whole, smoke)
    module = types.ModuleType("documented")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(code, "csv_regression.ipynb", "exec"), vars(module))
    assert len(shown) == 1
    pyplot.close("all")


@pytest.mark.slow
def test_first_page_trains_a_model_that_prefers_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    module = types.ModuleType("documented")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # where dataclasses look
    names: dict[str, Any] = vars(module)
    (code,) = BLOCK.findall((DOCS / "index.md").read_text())
    assert sum(map(bool, map(str.strip, code.splitlines()))) <= 15
    exec(compile(code, "index.md", "exec"), names)
    assert names["run"].metrics["loss"][-1] < 2.5 < names["run"].metrics["loss"][0]
    assert names["code"].log_likelihood > names["noise"].log_likelihood


@pytest.mark.slow
def test_page_on_the_python_interface_runs_in_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block in BLOCK.finditer((DOCS / "python_interface.md").read_text()):
        exec(compile(block[1], "python_interface.md", "exec"), names)
    assert names["run"].metrics["step"][-1] == 20
    assert names["batch"].ids.dtype == np.int32


def test_page_on_scale_lists_the_logical_axes():
    page = (DOCS / "partitioning.md").read_text()
    table = page.partition("the names of `DEFAULT_RULES`:\n\n")[2].partition("\n\n")[0]
    axes = [row.split("|")[1] for row in table.splitlines()]
    assert set(re.findall(r"`(\w+)`", " ".join(axes))) == set(dict(DEFAULT_RULES.table))


def test_example_of_decoding_from_python_runs_by_itself(capsys: pytest.CaptureFixture[str]):
    _, _, section = (DOCS / "decoding.md").read_text().partition("## From Python\n")
    block = BLOCK.search(section)
    assert block is not None
    exec(compile(block[1], "decoding.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "To be, " in printed
    assert "O " in printed


def test_example_of_hugging_face_folders_runs_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("safetensors")
    from layerkit.config import build
    from layerkit.interop.hugging_face import export_model, import_model
    from layerkit.interop.hugging_face.families.bert import BERT
    from layerkit.interop.hugging_face.families.llama import LLAMA

    content = {"model_type": "llama", "vocab_size": 12, "hidden_size": 8, "intermediate_size": 10}
    model = LLAMA.read_config(content | {"num_hidden_layers": 2, "num_attention_heads": 2})
    monkeypatch.chdir(tmp_path)
    export_model("Llama-3.2-1B", model, jax.jit(build(model).init)(jax.random.key(0)))
    _, _, section = (DOCS / "hugging_face.md").read_text().partition("## In Python\n")
    block = BLOCK.search(section)
    assert block is not None
    names: dict[str, Any] = {}
    exec(compile(block[1], "hugging_face.md", "exec"), names)
    assert names["logits"].shape == (1, 3, 12)
    import_model("my-llama")
    content |= {"model_type": "bert", "num_hidden_layers": 2, "num_attention_heads": 2}
    bert = BERT.read_config(content | {"architectures": ["BertModel"]})
    export_model("bge-small-en-v1.5", bert, jax.jit(build(bert).init)(jax.random.key(0)))
    block = BLOCK.search(section.partition("## Encoders and embeddings\n")[2])
    assert block is not None
    exec(compile(block[1], "hugging_face.md", "exec"), names)
    assert names["sentences"].shape == (2, 8)


@pytest.mark.slow
def test_page_on_speech_decodes_a_folder_of_whisper_and_a_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    soundfile, tokenizers, _ = map(pytest.importorskip, ("soundfile", "tokenizers", "safetensors"))
    from layerkit.config import build
    from layerkit.interop.hugging_face import export_model
    from layerkit.interop.hugging_face.families.whisper import WHISPER

    sizes = {"model_type": "whisper", "vocab_size": 8, "d_model": 8, "num_mel_bins": 4}
    sizes |= {"max_source_positions": 10, "max_target_positions": 6, "decoder_start_token_id": 5}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_layers": 1, f"{side}_attention_heads": 2, f"{side}_ffn_dim": 8}
    config = WHISPER.read_config(sizes)
    monkeypatch.chdir(tmp_path)
    variables = build(config).init(jax.random.key(0))
    export_model("whisper-tiny", config, variables)
    defaults = {"lang_to_id": {"<|en|>": 4}, "task_to_id": {"transcribe": 6}, "max_length": 6}
    defaults |= {"no_timestamps_token_id": 7, "suppress_tokens": [0, 2, 3, 4, 5, 6, 7]}
    Path("whisper-tiny/generation_config.json").write_text(json.dumps(defaults))
    words = {f"w{number}": number for number in range(8)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    tokenizer.save("whisper-tiny/tokenizer.json")
    soundfile.write("clip.wav", np.random.default_rng(0).normal(0, 0.1, 2000), 16_000)
    names: dict[str, Any] = {}
    for block in BLOCK.finditer((DOCS / "speech.md").read_text()):
        exec(compile(block[1], "speech.md", "exec"), names)
    assert capsys.readouterr().out.split() == ["w1", "w1"]  # the only one that is not suppressed
    loaded = {name: names["model"].variables[name] for name in variables}
    jax.tree.map(np.testing.assert_array_equal, loaded, variables)
    with pytest.raises(UserError, match="a model of texts"):
        names["model"].generate("w1")


@pytest.mark.slow
def test_page_on_a_model_of_ones_own_trains_decodes_and_loops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    text = (DOCS / "your_own_model.md").read_text()
    experiment, loop = (block[1] for block in BLOCK.finditer(text))
    commands = COMMANDS.findall(text)[0].splitlines()
    (tmp_path / "regression.py").write_text(
        experiment.replace("MAX_STEPS: int = 600", "MAX_STEPS: int = 60")
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        for command in commands:
            program, *words = shlex.split(command, comments=True)
            assert program == "runner"
            assert cli.main(words) == 0, command
        outputs = capsys.readouterr().out
        exec(compile(loop, "loop.py", "exec"), {})
        scored = BLOCK.findall((DOCS / "evaluation.md").read_text())
        (tmp_path / "scored.py").write_text("\n".join(scored))
        assert cli.main(["--exp=scored.Scored", "--job_log_dir=runs/scored"]) == 0
    finally:
        sys.modules.pop("scored", None)
        sys.modules.pop("regression", None)
    assert "eval heldout | absolute_error" in outputs
    (decoded,) = (tmp_path / "runs/first/decode/heldout").glob("*.jsonl")
    records = [json.loads(line) for line in decoded.read_text().splitlines()]
    assert len(records) == 2000 and records[0].keys() == {"example", "predicted", "y"}
    # What always answers 0 is off by the mean of |y|, 0.90.
    looped = capsys.readouterr().out
    assert float(re.findall(r"^absolute_error (.*)$", looped, re.MULTILINE)[0]) < 0.25
    (decoded,) = (tmp_path / "runs/scored/decode/heldout").glob("*.jsonl")
    records = [json.loads(line) for line in decoded.read_text().splitlines()]
    y = np.array([record["y"] for record in records])
    predicted = np.array([record["predicted"] for record in records])
    r2 = 1 - np.sum((y - predicted) ** 2) / np.sum((y - y.mean()) ** 2)
    reported = re.findall(r"eval heldout \| r2 (\S+)", looped)
    assert float(reported[-1]) == pytest.approx(r2, abs=1e-3)


def test_walk_through_from_pax_shows_a_translation_and_an_equal_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    page = (DOCS / "coming_from_pax.md").read_text()
    theirs, message, *_ = re.findall(r"^```\n((?:from paxml|translate:).*?)^```", page, re.M | re.S)
    (tmp_path / "pax_tiny.py").write_text(theirs)
    monkeypatch.chdir(tmp_path)
    assert translate.main(["pax", "pax_tiny.py", "--class=TinyLm"]) == 1
    printed = capsys.readouterr()
    assert message in printed.err
    completed = printed.out.replace(", abstract=True", "")
    names: dict[str, dict[str, Any]] = {}
    for name, code in {"translated": completed, "mine": BLOCK.findall(page)[0]}.items():
        names[name] = {"__name__": "mine"}
        exec(code, names[name])
    # An interval set before MAX_STEPS would be shortened.
    fields = {"MAX_STEPS": 100, "SUMMARY_INTERVAL_STEPS": 20}
    texts = [
        config_text(resolve(experiment))
        for experiment in (names["translated"]["TinyLm"](**fields), names["mine"]["TinyLm"]())
    ]
    # The order of fields follows the base classes.
    translated, mine = (sorted(text.splitlines()) for text in texts)
    assert translated == mine


@pytest.mark.slow
def test_walk_through_from_pax_trains_to_the_losses_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
):
    page = (DOCS / "coming_from_pax.md").read_text()
    request.addfinalizer(lambda: sys.modules.pop("mine", None))
    (tmp_path / "mine.py").write_text(BLOCK.findall(page)[0])
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    _, *words = shlex.split(COMMANDS.findall(page)[0])
    # The same batch on the eight devices of the tests.
    fields = ("PERCORE_BATCH_SIZE=0.5", "ICI_MESH_SHAPE=[1,1,8]")
    assert cli.main([*words, *(f"--fdl.{field}" for field in fields)]) == 0
    losses = {record["step"]: record["loss"] for record in read_metrics(Path("runs/tiny")).train}
    for step, loss in re.findall(r"^step (\d+)/100 \| loss (\S+)", page, re.M):
        assert losses[int(step)] == pytest.approx(float(loss), abs=1e-2)


def test_loss_function_of_layerkits_readme_keeps_moving_averages():
    from layerkit.layers import BatchNorm
    from layerkit.models import ClassificationModel

    config = ClassificationModel.HParams.config(network_tpl=BatchNorm.HParams.config(dims=2))
    config.softmax_tpl.set(input_dims=2, num_classes=3)
    model = config.Instantiate()
    names: dict[str, Any] = {"model": model, "jax": jax, "jnp": jnp}
    text = (DOCS.parent / "packages/layerkit/README.md").read_text()
    (block,) = [block[1] for block in BLOCK.finditer(text) if "loss_fn" in block[1]]
    exec(compile(block, "README.md", "exec"), names)
    state = model.init(jax.random.key(0))
    params = state.pop("params")
    batch = NestedMap(inputs=jnp.array([[1.0, 2.0], [3.0, 6.0]]), labels=jnp.array([0, 1]))
    for _ in range(2):
        _, state = names["loss_fn"](params, state, batch, jax.random.key(1))
    # From 0, twice a thousandth of the way to the means 2 and 4.
    expected = (1 - 0.999**2) * np.array([2.0, 4.0])
    moved = state["non_trainable"]["network"]["moving_mean"]
    np.testing.assert_allclose(moved, expected, rtol=1e-4)


def test_pages_import_layerkit_from_its_public_faces():
    deep = re.compile(r"^(?:from|import) (layerkit(?:\.\w+){2,})", re.MULTILINE)
    pages = [*DOCS.glob("*.md"), DOCS.parent / "README.md"]
    pages += (DOCS.parent / "packages" / name / "README.md" for name in ("layerkit", "runner"))
    imports = {name for page in pages for name in deep.findall(page.read_text())}
    assert imports <= {"layerkit.interop.hugging_face", "layerkit.interop.peft"}
