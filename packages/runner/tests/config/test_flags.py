"""The table of flags: the forms of each flag, and the errors about wrong ones."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from layerkit_runner.config.flags import parse_flags, read_flags
from layerkit_runner.config.help import help_text
from layerkit_runner.config.requests import Override
from layerkit_runner.errors import UsageError
from layerkit_runner.run.resolve import check_folder
from layerkit_runner.run_options import FLAGS, MODES, Flag, RunOptions, positive

EXP = "--exp=lm.Small"


def test_values_after_an_equals_sign_or_a_space():
    joined = parse_flags([EXP, "--mode=eval_once", "--restore_checkpoint_step=3", "--fdl.A=1"])
    words = "--exp lm.Small --mode eval_once --restore_checkpoint_step 3 --fdl.A 1"
    apart = parse_flags(words.split())
    assert joined == apart
    assert joined.exp == "lm.Small"
    assert joined.mode == "eval_once"
    assert joined.options == RunOptions(restore_checkpoint_step=(3,))
    assert joined.overrides == (Override("A", "1"),)
    assert parse_flags([EXP, "--fdl.A", "-1"]).overrides == (Override("A", "-1"),)


@pytest.mark.parametrize(
    ("words", "values"),
    [
        ("", {"enable_checkpoint_saving": True, "only_restore_step": None}),
        ("--enable_checkpoint_saving", {"enable_checkpoint_saving": True}),
        ("--noenable_checkpoint_saving", {"enable_checkpoint_saving": False}),
        ("--enable_checkpoint_saving=False", {"enable_checkpoint_saving": False}),
        ("--enable_checkpoint_saving=0", {"enable_checkpoint_saving": False}),
        ("--enable_checkpoint_saving=true", {"enable_checkpoint_saving": True}),
        ("--restore_checkpoint_step=0", {"restore_checkpoint_step": (0,), "only_restore_step": 0}),
        (
            "--mode=decode_once --restore_checkpoint_step=200,100,200",
            {"restore_checkpoint_step": (200, 100)},
        ),
        ("--hung_step_timeout_secs=off", {"hung_step_timeout_secs": None}),
        ("--hung_step_timeout_secs=60", {"hung_step_timeout_secs": 60}),
        (
            "--mode=decode --eval_during_decode --follow_timeout_secs=60",
            {"eval_during_decode": True, "follow_timeout_secs": 60},
        ),
        ("--checkpoint_todelete_subdir=old", {"checkpoint_todelete_subdir": "old"}),
        ("--coordinator_address=auto", {"coordinator_address": "auto"}),
        # Flags of Pax.
        ("--multiprocess_gpu", {"coordinator_address": "auto"}),
        (
            "--multiprocess_gpu --server_addr=host:1 --num_hosts=4 --host_idx=3",
            {"coordinator_address": "host:1", "num_processes": 4, "process_id": 3},
        ),
        ("--mode=inspect --inspect=batches --num_hosts=4", {"num_hosts": 4, "num_processes": None}),
    ],
)
def test_options_are_read(words: str, values: dict[str, Any]):
    options = parse_flags([EXP, *words.split()]).options
    assert {name: getattr(options, name) for name in values} == values


def test_fdl_config_is_another_name_of_exp(raises):
    assert parse_flags(["--fdl_config=lm.Small"]).exp == "lm.Small"
    assert parse_flags([EXP, "--fdl_config=lm.Small"]).exp == "lm.Small"
    with raises(UsageError, field="--exp", value="lm.Big"):
        parse_flags([EXP, "--fdl_config=lm.Big"])


STEPS = "--restore_checkpoint_step"
TWO = "--num_processes=2"


@pytest.mark.parametrize(
    ("words", "data"),
    [
        # Unknown flags and words.
        (["--job_log_dri=x"], {"value": "--job_log_dri"}),
        (["--noenable_checkpoint_savin"], {"value": "--noenable_checkpoint_savin"}),
        (["--NUM_LAYERS=3"], {"value": "--NUM_LAYERS", "choices": ()}),
        (["train"], {"value": "train", "hint": "Did you mean --mode=train?"}),
        (["docter"], {"value": "docter", "choices": ("doctor",)}),
        # Values.
        (["--mode=evil"], {"field": "--mode", "value": "evil"}),
        (["--mode", "--json"], {"field": "--mode", "value": "--json"}),
        (["--host_idx"], {"field": "--process_id", "value": "", "expected": "I"}),
        (["--fdl.NUM_LAYERS"], {"field": "--fdl.NUM_LAYERS"}),
        (["--job_log_dir="], {"field": "--job_log_dir", "value": ""}),
        (["--checkpoint_todelete_subdir=a/b"], {"value": "a/b"}),
        (["--json=ja"], {"field": "--json", "value": "ja"}),
        (["--html=page"], {"expected": "the path of an .html file to write"}),
        ([f"--html={__file__}/a.html"], {"field": "--html", "value": f"{__file__}/a.html"}),
        ([f"{STEPS}=last"], {"field": STEPS, "value": "last"}),
        ([f"{STEPS}=-1"], {"field": STEPS, "value": "-1"}),
        (["--coordinator_address=host"], {"field": "--coordinator_address", "value": "host"}),
        (["--mode=eval", "--mode=train"], {"field": "--mode", "value": "train"}),
        # Flags of another mode.
        (["--mode=eval", f"{STEPS}=100"], {"field": STEPS}),
        (["--mode=plan", "--noenable_checkpoint_saving"], {"field": "--enable_checkpoint_saving"}),
        (["--mode=eval", "--html=a.html"], {"field": "--html"}),
        (["--mode=plan", "--compare=a.json"], {"field": "--compare", "expected": "--html with it"}),
        (["--mode=plan", "--max_seconds=9"], {"field": "--max_seconds"}),
        (
            ["--mode=lm_eval", "--init_from=a", "--restore_checkpoint_step=5"],
            {"field": "--init_from and --restore_checkpoint_step"},
        ),
        # Flags that do not fit together.
        (["--mode=export", f"{STEPS}=100,200"], {"field": STEPS, "value": "100,200"}),
        (["--init_from=a", "--restore_checkpoint_dir=b"], {}),
        ([TWO, "--num_hosts=4"], {"field": "--num_hosts", "value": 4}),
        (["--fdl.A=1", "--fdl.A=2"], {}),
    ],
    ids=" ".join,
)
def test_wrong_flag_raises(raises, words: list[str], data: dict[str, Any]):
    with raises(UsageError, **data):
        parse_flags([EXP, *words])


def test_name_of_a_folder_that_is_not_utf8_raises_before_anything_is_written(
    raises, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    # TensorStore accepts only paths in UTF-8, so every save in such a folder would fail.
    folder = tmp_path / os.fsdecode(b"j\xe4")
    with raises(UsageError, field="--job_log_dir", value=str(folder)):
        parse_flags([EXP, f"--job_log_dir={folder}"])
    folder.mkdir()
    monkeypatch.chdir(folder)
    with raises(UsageError, field="--job_log_dir", value="job"):
        parse_flags([EXP, "--job_log_dir=job"])
    parse_flags([EXP, f"--job_log_dir={tmp_path}/ä"])


def test_listings_need_no_experiment():
    assert parse_flags(["--list"]).values == {"list": True}
    assert parse_flags(["--help"]).values == parse_flags(["-h"]).values == {"help": True}


@pytest.mark.parametrize("mode", sorted(MODES.keys() - {"generate"}))
def test_mode_that_writes_requires_a_folder(raises, mode: str):
    with raises(UsageError, problem="missing flag", field="--job_log_dir"):
        check_folder(parse_flags([EXP, f"--mode={mode}"]))
    check_folder(parse_flags([EXP, f"--mode={mode}", "--job_log_dir=gs://bucket/run"]))


@pytest.mark.parametrize("mode", ["plan", "inspect"])
def test_mode_that_only_prints_requires_no_folder(mode: str):
    check_folder(parse_flags([EXP, f"--mode={mode}"]))


def test_help_fits_one_screen_and_lists_all_flags():
    lines = help_text().splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= 100
    text = help_text("all")
    listed = set(re.findall(r"^  --(?:\[no\])?([\w.]+)", text, re.MULTILINE))
    assert listed == {"fdl.NAME", *(flag.name for flag in FLAGS)}
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize("mode", [*MODES, "plan", "inspect"])
def test_help_of_a_mode_lists_its_flags(mode: str):
    text = help_text(mode)
    listed = set(re.findall(r"^  --(?:\[no\])?(\w+)", text, re.MULTILINE))
    assert listed == {flag.name for flag in FLAGS if mode in flag.modes}
    assert max(map(len, text.splitlines())) <= 100


def test_help_of_an_unknown_topic_raises(raises):
    with raises(UsageError, field="--help", value="checkpoint"):
        help_text("checkpoint")


def test_tfds_data_dir_of_pax_sets_the_field(raises):
    parsed = parse_flags([EXP, "--tfds_data_dir=gs://bucket/tfds"])
    assert list(map(str, parsed.overrides)) == ["--fdl.TFDS_DATA_DIR=gs://bucket/tfds"]
    with raises(UsageError, problem="contradictory flags"):
        parse_flags([EXP, "--tfds_data_dir=a", "--fdl.TFDS_DATA_DIR=b"])


def test_repeated_flag_keeps_all_values(raises):
    assert parse_flags(["--list", "--tag=moe"]).values["tag"] == ("moe",)
    assert parse_flags(["--tag=moe", "--list", "--tag", "lm"]).values["tag"] == ("moe", "lm")
    with raises(UsageError, field="--tag", value=""):
        parse_flags(["--list", "--tag="])


def test_read_flags_returns_the_flags_of_a_tool_and_the_other_words(raises):
    rows = [
        Flag("nodes", positive, "how many", "N", default=1),
        Flag("sbatch", lambda text: text, "another option", "OPTION", repeats=True),
        Flag("dry_run", bool, "print", default=False),
    ]
    words = ["--exp", "lm.Small", "--nodes", "2", "--fdl.A", "-1", "--sbatch=--qos=high", "--json"]
    given, others = read_flags([*words, "--sbatch=a", "--dry_run"], rows, known_only=True)
    assert given == {"nodes": 2, "sbatch": ("--qos=high", "a"), "dry_run": True}
    assert others == ["--exp", "lm.Small", "--fdl.A", "-1", "--json"]
    with raises(UsageError, field="--nodes", value="0"):
        read_flags(["--nodes=0"], rows, known_only=True)
    with raises(UsageError, value="--dri_run"):
        read_flags(["--dri_run"], rows)
