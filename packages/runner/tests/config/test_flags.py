"""The table of flags: the forms of each flag, and the errors about wrong ones."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import absl.logging  # noqa: F401 - defines flags, as a library would
import pytest
from absl import flags as absl_flags

from layerkit_runner.config.flags import check_folder, parse_flags, read_flags
from layerkit_runner.config.help import GROUPS, help_text
from layerkit_runner.config.overrides import Override
from layerkit_runner.errors import UsageError
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


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], True),
        (["--enable_checkpoint_saving"], True),
        (["--noenable_checkpoint_saving"], False),
        (["--enable_checkpoint_saving=False"], False),
        (["--enable_checkpoint_saving=0"], False),
        (["--enable_checkpoint_saving=true"], True),
    ],
)
def test_boolean_flag_has_each_spelling_of_absl(words: list[str], *, expected: bool):
    assert parse_flags([EXP, *words]).options.enable_checkpoint_saving is expected


def test_fdl_config_is_another_name_of_exp(raises):
    assert parse_flags(["--fdl_config=lm.Small"]).exp == "lm.Small"
    assert parse_flags([EXP, "--fdl_config=lm.Small"]).exp == "lm.Small"
    with raises(UsageError, field="--exp", value="lm.Big"):
        parse_flags([EXP, "--fdl_config=lm.Big"])


def test_negative_values_are_values():
    assert parse_flags([EXP, "--fdl.A", "-1"]).overrides == (Override("A", "-1"),)


STEPS = "--restore_checkpoint_step"
TWO = "--num_processes=2"


@pytest.mark.parametrize(
    ("words", "data"),
    [
        # Unknown flags and words.
        (["--job_log_dri=x"], {"value": "--job_log_dri"}),
        (["--job-log-dir=x"], {"value": "--job-log-dir"}),
        (["--noenable_checkpoint_savin"], {"value": "--noenable_checkpoint_savin"}),
        (["--nomode"], {"value": "--nomode"}),
        (["--NUM_LAYERS=3"], {"value": "--NUM_LAYERS", "choices": ()}),
        (["--enforce_restore_shape_check"], {"value": "--enforce_restore_shape_check"}),
        (["--flagfile=/etc/passwd"], {"value": "--flagfile"}),
        (["--undefok=job_log_dri"], {"value": "--undefok"}),
        (["train"], {"value": "train", "hint": "Did you mean --mode=train?"}),
        (["True"], {"value": "True", "choices": ()}),
        (["--", "--json"], {"value": "--json"}),
        (["docter"], {"value": "docter", "choices": ("doctor",)}),
        (["--json", "doctor"], {"value": "doctor"}),
        # Values.
        (["--mode=evil"], {"field": "--mode", "value": "evil"}),
        (["--mode", "--json"], {"field": "--mode", "value": "--json"}),
        (["--fdl.NUM_LAYERS"], {"field": "--fdl.NUM_LAYERS"}),
        (["--job_log_dir="], {"field": "--job_log_dir", "value": ""}),
        (["--json=ja"], {"field": "--json", "value": "ja"}),
        ([f"{STEPS}=last"], {"field": STEPS, "value": "last"}),
        ([f"{STEPS}=-1"], {"field": STEPS, "value": "-1"}),
        (["--peak_tflops_per_device=0"], {"field": "--peak_tflops_per_device", "value": "0"}),
        (["--peak_tflops_per_device=H"], {"field": "--peak_tflops_per_device", "value": "H"}),
        (["--jax_profiler_port=0"], {"field": "--jax_profiler_port", "value": "0"}),
        (["--async_timeout_secs=x"], {"field": "--async_timeout_secs", "value": "x"}),
        (["--init_from=d", "--init_draw=["], {"field": "--init_draw", "value": "["}),
        (["--hung_step_timeout_secs=0"], {"field": "--hung_step_timeout_secs", "value": "0"}),
        (["--coordinator_address=host"], {"field": "--coordinator_address", "value": "host"}),
        (["--mode=inspect", "--inspect=batch"], {"field": "--inspect", "value": "batch"}),
        (["--mode=eval", "--mode=train"], {"field": "--mode", "value": "train"}),
        # Flags of another mode.
        (["--mode=eval", f"{STEPS}=100"], {"field": STEPS}),
        (["--json"], {"field": "--json", "expected": "--mode=plan or inspect"}),
        (["--mode=plan", "--noenable_checkpoint_saving"], {"field": "--enable_checkpoint_saving"}),
        (["--mode=inspect", "--inspect=config", "--num_batches=3"], {"field": "--num_batches"}),
        # Flags that do not fit together.
        (["--mode=export", f"{STEPS}=100,200"], {"field": STEPS, "value": "100,200"}),
        (["--exit_after_ondemand_checkpoint", "--noenable_checkpoint_saving"], {}),
        (["--init_from=a", "--restore_checkpoint_dir=b"], {}),
        (["--print_config", "--diff_config=lm.Large"], {}),
        ([TWO, "--process_id=2"], {"field": "--process_id", "value": 2}),
        ([TWO, "--num_hosts=4"], {"field": "--num_hosts=4 and --num_processes=2"}),
        (["--tag=small"], {"field": "--tag", "expected": "--list with it"}),
        (["--fdl.A=1", "--fdl.A=2"], {}),
    ],
    ids=" ".join,
)
def test_wrong_flag_raises(raises, words: list[str], data: dict[str, Any]):
    with raises(UsageError, **data):
        parse_flags([EXP, *words])


@pytest.mark.parametrize("words", [["--mode"], ["--job_log_dir", "--fdl.A=2"]], ids=" ".join)
def test_flag_without_value_raises(raises, words: list[str]):
    with raises(UsageError):
        parse_flags([EXP, *words])


def test_training_in_a_recorded_folder_names_its_experiment(raises, tmp_path: Path):
    record: dict[str, Any] = {"experiment": "notes.Notes", "overrides": {}, "fields": {}}
    (tmp_path / "config.json").write_text(json.dumps(record | {"config": {}}))
    with raises(UsageError, field="--exp", hint=f"{tmp_path} was written by --exp='notes.Notes'."):
        parse_flags([f"--job_log_dir={tmp_path}", "--fdl.MAX_STEPS=50"])


def test_experiment_is_required_except_by_listings(raises):
    for words in ([], ["--mode=eval"]):
        with raises(UsageError, field="--exp"):
            parse_flags(words)
    assert parse_flags(["--list"]).given == {"list": True}
    assert parse_flags(["--help"]).given == parse_flags(["-h"]).given == {"help": True}


@pytest.mark.parametrize("mode", MODES)
def test_mode_that_writes_requires_a_folder(raises, mode: str):
    with raises(UsageError, problem="missing flag", field="--job_log_dir"):
        check_folder(parse_flags([EXP, f"--mode={mode}"]))
    check_folder(parse_flags([EXP, f"--mode={mode}", "--job_log_dir=gs://bucket/run"]))


@pytest.mark.parametrize("mode", ["plan", "inspect"])
def test_mode_that_only_prints_requires_no_folder(mode: str):
    check_folder(parse_flags([EXP, f"--mode={mode}"]))


def test_every_option_has_a_flag_of_its_name_and_default():
    flags = {flag.name: flag for flag in FLAGS}
    for option in dataclasses.fields(RunOptions):
        if option.name != "extra":
            assert flags[option.name].default == option.default
            assert flags[option.name].is_switch == (option.type == "bool")


def test_every_flag_is_in_one_group_of_the_help():
    grouped = [name for _, *names in GROUPS.values() for name in names]
    assert sorted(grouped) == sorted([*(flag.name for flag in FLAGS), "fdl.NAME"])


@pytest.mark.parametrize("topic", [None, *GROUPS])
def test_help_of_a_group_fits_one_screen(topic: str | None):
    lines = help_text(topic).splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= 100


@pytest.mark.parametrize("mode", [*MODES, "plan", "inspect"])
def test_help_of_a_mode_lists_its_flags(mode: str):
    text = help_text(mode)
    listed = set(re.findall(r"^  --(?:\[no\])?(\w+)", text, re.MULTILINE))
    assert listed == {flag.name for flag in FLAGS if mode in flag.modes}
    assert max(map(len, text.splitlines())) <= 100


def test_help_of_an_unknown_topic_raises(raises):
    with raises(UsageError, field="--help", value="checkpoint"):
        help_text("checkpoint")


@pytest.mark.parametrize(
    "words",
    [
        ["--coordinator_address=auto"],
        ["--coordinator_address=host:1", "--num_processes=2", "--process_id=1"],
    ],
)
def test_coordinator_address_is_read(words: list[str]):
    options = parse_flags([EXP, *words]).options
    assert options.coordinator_address == words[0].partition("=")[2]


def test_pax_flags_are_replaced(raises):
    words = ["--multiprocess_gpu", "--server_addr=host:1", "--num_hosts=4", "--host_idx=3"]
    options = parse_flags([EXP, *words]).options
    assert options.coordinator_address == "host:1"
    assert (options.num_processes, options.process_id) == (4, 3)
    assert parse_flags([EXP, "--multiprocess_gpu"]).options.coordinator_address == "auto"
    options = parse_flags([EXP, "--mode=inspect", "--inspect=batches", "--num_hosts=4"]).options
    assert (options.num_hosts, options.num_processes) == (4, None)
    parsed = parse_flags([EXP, "--tfds_data_dir=gs://bucket/tfds"])
    assert list(map(str, parsed.overrides)) == ["--fdl.TFDS_DATA_DIR=gs://bucket/tfds"]
    with raises(UsageError, problem="contradictory flags"):
        parse_flags([EXP, "--tfds_data_dir=a", "--fdl.TFDS_DATA_DIR=b"])


@pytest.mark.parametrize("name", ["a/b", "..", "checkpoint_1", ""])
def test_folder_of_moved_checkpoints_is_one_name(raises, name: str):
    flag = "--checkpoint_todelete_subdir"
    assert parse_flags([EXP, f"{flag}=old"]).options.checkpoint_todelete_subdir == "old"
    with raises(UsageError, field=flag, value=name):
        parse_flags([EXP, f"{flag}={name}"])


def test_reduced_is_a_switch():
    assert "reduced" not in parse_flags([EXP]).given
    assert parse_flags([EXP, "--reduced"]).given["reduced"]
    assert not parse_flags([EXP, "--noreduced"]).given["reduced"]


def test_repeated_flag_keeps_all_values(raises):
    assert parse_flags(["--list", "--tag=moe"]).given["tag"] == ("moe",)
    assert parse_flags(["--tag=moe", "--list", "--tag", "lm"]).given["tag"] == ("moe", "lm")
    with raises(UsageError, field="--tag", value=""):
        parse_flags(["--list", "--tag="])


def test_timeout_can_be_off():
    assert parse_flags([EXP]).options.hung_step_timeout_secs == 1800
    assert parse_flags([EXP, "--hung_step_timeout_secs=off"]).options.hung_step_timeout_secs is None
    assert parse_flags([EXP, "--hung_step_timeout_secs=60"]).options.hung_step_timeout_secs == 60


def test_restore_step_can_be_several():
    words = ["--mode=decode_once", "--restore_checkpoint_step=200,100,200"]
    options = parse_flags([EXP, *words]).options
    assert options.restore_checkpoint_step == (200, 100)
    options = parse_flags([EXP, "--restore_checkpoint_step=0"]).options
    assert (options.restore_checkpoint_step, options.only_restore_step) == ((0,), 0)
    assert parse_flags([EXP]).options.only_restore_step is None


def test_evaluation_and_decoding_flags_are_read():
    options = parse_flags([EXP]).options
    assert (options.eval_on_test, options.decode_during_train) == (True, False)
    options = parse_flags([EXP, "--noeval_on_test", "--decode_during_train"]).options
    assert (options.eval_on_test, options.decode_during_train) == (False, True)
    words = ["--mode=decode", "--eval_during_decode", "--follow_timeout_secs=60"]
    options = parse_flags([EXP, *words]).options
    assert (options.eval_during_decode, options.follow_timeout_secs) == (True, 60)


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


def test_flags_that_libraries_define_through_absl_are_unknown():
    absl_flags.DEFINE_string("job_log_dir", "theirs", "of a library")
    try:
        assert parse_flags([EXP, "--job_log_dir=ours"]).options.job_log_dir == "ours"
        assert "logger_levels" in absl_flags.FLAGS
        with pytest.raises(UsageError):
            parse_flags([EXP, "--logger_levels=x:1"])
    finally:
        delattr(absl_flags.FLAGS, "job_log_dir")
