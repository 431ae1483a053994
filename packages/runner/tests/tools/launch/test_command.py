"""The command line of `runner launch`."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from layerkit_runner import cli
from layerkit_runner.config import flags
from layerkit_runner.run_options import FLAGS
from layerkit_runner.tools.launch.command import KINDS

DOCS = Path(__file__).resolve().parents[5] / "docs"
EXP = "lm.lm_cloud.LmCloudSpmdTest"


def launch(*words: str) -> int:
    return cli.main(["launch", *words])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["slurm", "--nods=2"], "'--nodes'"),
        (["slurm", "--nodes=0"], "--nodes='0'"),
        (["slurm", f"--exp={EXP}"], "missing flag: --job_log_dir"),
        (["slurm", f"--exp={EXP}", "--job_log_dir=d", "--num_processes=2"], "--num_processes"),
        (["slurm", f"--exp={EXP}", "--mode=plan"], "--mode='plan'"),
        (["slurm", "--list"], "this command only prints"),
    ],
)
def test_mistake_exits_with_2_and_writes_nothing(
    tmp_path: Path, capsys, monkeypatch, words, message
):
    monkeypatch.chdir(tmp_path)
    assert launch(*words) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err and "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


def test_wrong_flag_is_reported_before_jax_is_imported():
    program = (
        "import sys; from layerkit_runner import cli; code = cli.main(['launch', 'slurm',"
        " '--nods=2']); assert not {'jax', 'fiddle', 'yaml'} & set(sys.modules); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, "'--nodes'" in done.stderr) == (2, True), done.stderr


def test_help_lists_the_kinds_and_the_flags_of_each(capsys):
    assert launch() == 0
    text = capsys.readouterr().out
    assert all(f"  {kind}" in text for kind in KINDS)
    assert launch("slurm", "--help") == 0
    assert "--save_before_end=SECONDS" in capsys.readouterr().out
    assert cli.main(["--help", "all"]) == 0
    assert "  runner launch " in capsys.readouterr().out


@pytest.mark.parametrize("kind", KINDS)
def test_flags_of_a_kind_differ_from_those_of_the_runner(kind):
    known = {flag.name for flag in FLAGS} | set(flags.PAX_FLAGS)
    assert not known & {flag.name for flag in KINDS[kind].FLAGS}


def test_words_of_the_run_have_an_absolute_folder_and_no_pax_names(
    tmp_path: Path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    words = [f"--fdl_config={EXP}", "--job_log_dir", "runs/a", "--noenable_checkpoint_saving"]
    words += ["--hung_step_timeout_secs=off", "--pmap_use_tensorstore", "--dry_run"]
    assert launch("local", *words, "--fdl.ICI_MESH_SHAPE=[1, 1, 1]") == 0
    text = capsys.readouterr().out
    run = shlex.split(text[text.index("run=(") : text.index("\n)\n")].removeprefix("run=("))
    assert run[-6:] == [
        f"--exp={EXP}",
        "--fdl.ICI_MESH_SHAPE=[1, 1, 1]",
        f"--job_log_dir={tmp_path}/runs/a",
        "--noenable_checkpoint_saving",
        "--hung_step_timeout_secs=off",
        "--pmap_use_tensorstore",
    ]
    assert text.rstrip().endswith(f"bash {tmp_path}/runs/a/launch/local.sh")
    assert list(tmp_path.iterdir()) == []


def test_scores_of_a_folder_need_no_experiment(tmp_path: Path, capsys):
    safetensors = pytest.importorskip("safetensors.numpy")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 4}
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **sizes}
    config |= {"num_attention_heads": 2, "rms_norm_eps": 1e-5, "max_position_embeddings": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    safetensors.save_file({"x": np.zeros(1)}, tmp_path / "model.safetensors")
    words = ["--mode=lm_eval", f"--init_from={tmp_path}", f"--job_log_dir={tmp_path}/job"]
    assert launch("local", *words, "--tasks=arc_easy", "--dry_run") == 0
    text = capsys.readouterr().out
    assert f"--init_from={tmp_path}" in text and "--exp" not in text


def test_mesh_of_other_devices_is_an_error_with_the_flags_of_the_mesh(tmp_path: Path, capsys):
    words = [f"--exp={EXP}", f"--job_log_dir={tmp_path}/job", "--nodes=1", "--gpus_per_node=7"]
    assert launch("slurm", *words) == 2
    settings = "Set --fdl.partitioner.ici_mesh_shape=… --fdl.partitioner.dcn_mesh_shape=…"
    assert settings in capsys.readouterr().err


def test_missing_program_is_an_error(tmp_path: Path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", os.fspath(tmp_path))
    words = [f"--exp={EXP}", f"--job_log_dir={tmp_path}/run", "--script=it.sh"]
    assert launch("slurm", *words) == 2
    assert "sbatch" in capsys.readouterr().err


def documented() -> list[list[str]]:
    """Return the `runner launch` commands of the docs, with the variables of the pages replaced."""
    result = []
    for page in sorted((DOCS / "launch").glob("*.md")):
        variables: dict[str, str] = {}
        for block in re.findall(r"^```bash\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
            variables |= dict(re.findall(r'^(\w+)="(.*)"$', block, re.MULTILINE))
            for line in block.replace("\\\n", " ").splitlines():
                for name, value in reversed(variables.items()):  # a later one may name an earlier
                    line = line.replace(f"${name}", value)
                if line.startswith("runner launch ") and "KIND" not in line:
                    words = shlex.split(line, comments=True)[2:]
                    result.append([word for word in words if word != "--dry_run"])
    return result


def test_docs_have_commands_of_every_kind():
    assert {words[0] for words in documented()} == set(KINDS)


@pytest.mark.slow
@pytest.mark.parametrize("words", documented(), ids=" ".join)
def test_command_of_the_docs_passes_a_dry_run(words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert launch(*words, "--dry_run") == 0
    out, err = capsys.readouterr()
    assert "# would run\n" in out
    assert err == ""  # no data is missing
    assert list(tmp_path.iterdir()) == []
