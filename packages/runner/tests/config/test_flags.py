"""The flag table: every form a flag can take, and what each mistake hears."""

from __future__ import annotations

import dataclasses

import absl.logging  # noqa: F401 - defines flags, as a library would
import pytest
from absl import flags as absl_flags

from layerkit_runner.config.flags import check_folder, help_text, parse_flags, read_flags
from layerkit_runner.config.overrides import Override
from layerkit_runner.errors import UsageError
from layerkit_runner.run_options import FLAGS, Flag, RunOptions, positive

EXP = "--exp=lm.Small"


def refusal(*arguments: str) -> str:
    with pytest.raises(UsageError) as caught:
        parse_flags(arguments)
    return str(caught.value)


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
def test_switches(words: list[str], *, expected: bool):
    assert parse_flags([EXP, *words]).options.enable_checkpoint_saving is expected


def test_fdl_config_is_exp_by_another_name():
    assert parse_flags(["--fdl_config=lm.Small"]).exp == "lm.Small"
    assert parse_flags([EXP, "--fdl_config=lm.Small"]).exp == "lm.Small"
    assert refusal(EXP, "--fdl_config=lm.Big") == (
        "--exp is given twice, with 'lm.Small' and 'lm.Big'."
    )


def test_negative_values_are_values():
    assert parse_flags([EXP, "--fdl.A", "-1"]).overrides == (Override("A", "-1"),)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--job_log_dri=x"], "there is no flag --job_log_dri; did you mean '--job_log_dir'?"),
        (["--job-log-dir=x"], "there is no flag --job-log-dir; did you mean '--job_log_dir'?"),
        (
            ["--noenable_checkpoint_savin"],
            "there is no flag --noenable_checkpoint_savin; did you mean"
            " '--noenable_checkpoint_saving' or '--enable_checkpoint_saving'?",
        ),
        (["--nomode"], "there is no flag --nomode; did you mean '--mode'?"),
        (["--zzz"], "there is no flag --zzz."),
        (
            ["--NUM_LAYERS=3"],
            "there is no flag --NUM_LAYERS; experiment fields are set by --fdl.NUM_LAYERS=…",
        ),
        (["train"], "unexpected argument 'train'; did you mean '--mode=train'?"),
        (
            ["True"],
            "unexpected argument 'True'; flags are written --name=value, and switches --name or"
            " --noname.",
        ),
        (
            ["--mode=evil"],
            "--mode=evil: expected one of train, eval, eval_once, decode, decode_once, export,"
            " inspect, plan; did you mean 'eval'?",
        ),
        (["--mode"], "Missing value for flag --mode"),
        (["--mode", "--json"], "--mode=--json: expected MODE."),
        (["--fdl.NUM_LAYERS"], "--fdl.NUM_LAYERS needs a value: --fdl.NUM_LAYERS=…"),
        (["--job_log_dir="], "--job_log_dir=: expected DIR."),
        (["--json=ja"], "--json=ja: expected True or False."),
        (
            ["--restore_checkpoint_step=last"],
            "--restore_checkpoint_step=last: expected a non-negative integer, or several with"
            " commas between them.",
        ),
        (
            ["--mode=export", "--restore_checkpoint_step=100,200"],
            "--restore_checkpoint_step=100,200: --mode=export reads one step; eval_once and"
            " decode_once take several.",
        ),
        (
            ["--mode=eval", "--restore_checkpoint_step=100"],
            "--restore_checkpoint_step belongs to --mode=train, eval_once, decode_once or export,"
            " and the mode is eval.",
        ),
        (
            ["--restore_checkpoint_step=-1"],
            "--restore_checkpoint_step=-1: expected a non-negative integer, or several with"
            " commas between them.",
        ),
        (
            ["--peak_tflops_per_device=0"],
            "--peak_tflops_per_device=0: expected a positive number.",
        ),
        (
            ["--peak_tflops_per_device=H100"],
            "--peak_tflops_per_device=H100: expected a positive number.",
        ),
        (
            ["--exit_after_ondemand_checkpoint", "--noenable_checkpoint_saving"],
            "--exit_after_ondemand_checkpoint leaves after a save, and --noenable_checkpoint_saving"
            " saves nothing; keep one.",
        ),
        (
            ["--jax_profiler_port=0"],
            "--jax_profiler_port=0: expected a positive integer.",
        ),
        (["--mode=eval", "--mode=train"], "--mode is given twice, with 'eval' and 'train'."),
        (["--json"], "--json belongs to --mode=plan or inspect, and the mode is train."),
        (["--log_level=debug"], "there is no flag --log_level."),
        (
            ["--mode=plan", "--restore_checkpoint_dir=there"],
            "--restore_checkpoint_dir belongs to --mode=train, eval, eval_once, decode, decode_once"
            " or export, and the mode is plan.",
        ),
        (
            ["--mode=inspect", "--pmap_use_tensorstore"],
            "--pmap_use_tensorstore belongs to --mode=train, eval, eval_once, decode or"
            " decode_once, and the mode is inspect.",
        ),
        (
            ["--mode=plan", "--noenable_checkpoint_saving"],
            "--enable_checkpoint_saving belongs to --mode=train, and the mode is plan.",
        ),
        (
            ["--mode=inspect", "--inspect=batch"],
            "--inspect=batch: expected one of config, layers, parameters, graph, batches; did you"
            " mean 'batches'?",
        ),
        (["--inspect=batches"], "--inspect belongs to --mode=inspect, and the mode is train."),
        (
            ["--coordinator_address=host", "--num_processes=2", "--process_id=1"],
            "--coordinator_address=host: expected HOST:PORT, or auto.",
        ),
        (
            ["--coordinator_address=host:1", "--num_processes=2", "--process_id=2"],
            "--process_id=2 with --num_processes=2: expected 0 to 1.",
        ),
        (["--num_processes=0"], "--num_processes=0: expected a positive integer."),
        (
            ["--num_hosts=4", "--num_processes=2"],
            "--num_hosts=4 and --num_processes=2 are the same flag here; keep one.",
        ),
        (
            ["--server_addr=host:1", "--coordinator_address=host:2"],
            "--coordinator_address is given twice, with 'host:1' and 'host:2'.",
        ),
        (
            ["--hung_step_timeout_secs=0"],
            "--hung_step_timeout_secs=0: expected a positive integer, or off.",
        ),
        (["--flagfile=/etc/passwd"], "there is no flag --flagfile."),
        (["--undefok=job_log_dri"], "there is no flag --undefok."),
        (["--job_log_dir", "--fdl.A=2"], "Missing value for flag --job_log_dir"),
        (
            ["--", "--json"],
            "unexpected argument '--json'; flags are written --name=value, and"
            " switches --name or --noname.",
        ),
        (
            ["--fdl.taks.model.num_layers=3"],
            "--fdl.taks.model.num_layers: a path starts with task, datasets, decode_datasets,"
            " partitioner, train_programs, eval_programs, decode_programs, executor or observers,"
            " not 'taks'; did you mean 'task'?",
        ),
        (
            ["--fdl.A=1", "--fdl.A=2"],
            "--fdl.A=1 and --fdl.A=2 contradict each other; keep one of them.",
        ),
    ],
)
def test_mistakes(words: list[str], text: str):
    assert refusal(EXP, *words) == text


def test_an_experiment_must_be_named_unless_it_is_not_needed():
    assert refusal() == "which experiment? Say --exp=NAME; `runner --list` shows all."
    assert parse_flags(["--list"]).given == {"list": True}
    assert refusal("--tag=moe") == "--tag needs --list."
    assert parse_flags(["--help"]).given == parse_flags(["-h"]).given == {"help": True}


@pytest.mark.parametrize("mode", ["train", "eval", "eval_once", "decode", "decode_once", "export"])
def test_modes_that_write_need_a_folder(mode: str):
    with pytest.raises(UsageError) as caught:
        check_folder(parse_flags([EXP, f"--mode={mode}"]))
    assert str(caught.value) == (f"--mode={mode} needs a folder to write to: --job_log_dir=DIR")
    check_folder(parse_flags([EXP, f"--mode={mode}", "--job_log_dir=gs://bucket/run"]))


@pytest.mark.parametrize("mode", ["plan", "inspect"])
def test_modes_that_only_print_need_no_folder(mode: str):
    check_folder(parse_flags([EXP, f"--mode={mode}"]))


def test_every_option_has_a_flag_of_its_name_and_default():
    flags = {flag.name: flag for flag in FLAGS}
    for option in dataclasses.fields(RunOptions):
        if option.name != "extra":
            assert flags[option.name].default == option.default
            assert flags[option.name].is_switch == (option.type == "bool")


def test_help_names_every_flag():
    lines = help_text().splitlines()
    for flag in FLAGS:
        assert any(f"--{flag.name}" in line or f"--[no]{flag.name}" in line for line in lines)
    assert max(map(len, lines)) <= 100


@pytest.mark.parametrize(
    "words",
    [
        ["--coordinator_address=auto"],
        ["--coordinator_address=host:1", "--num_processes=2", "--process_id=1"],
    ],
)
def test_processes_are_told_how_to_meet(words: list[str]):
    options = parse_flags([EXP, *words]).options
    assert options.coordinator_address == words[0].partition("=")[2]


def test_the_names_of_pax():
    words = ["--multiprocess_gpu", "--server_addr=host:1", "--num_hosts=4", "--host_idx=3"]
    options = parse_flags([EXP, *words]).options
    assert options.coordinator_address == "host:1"
    assert (options.num_processes, options.process_id) == (4, 3)
    assert parse_flags([EXP, "--multiprocess_gpu"]).options.coordinator_address == "auto"
    options = parse_flags([EXP, "--mode=inspect", "--inspect=batches", "--num_hosts=4"]).options
    assert (options.num_hosts, options.num_processes) == (4, None)
    parsed = parse_flags([EXP, "--tfds_data_dir=gs://bucket/tfds"])
    assert list(map(str, parsed.overrides)) == ["--fdl.TFDS_DATA_DIR=gs://bucket/tfds"]
    with pytest.raises(UsageError, match="contradict each other; keep one of them"):
        parse_flags([EXP, "--tfds_data_dir=a", "--fdl.TFDS_DATA_DIR=b"])


def test_a_reduced_form():
    assert "reduced" not in parse_flags([EXP]).given
    assert parse_flags([EXP, "--reduced"]).given["reduced"]
    assert not parse_flags([EXP, "--noreduced"]).given["reduced"]


def test_a_flag_that_may_be_given_several_times():
    assert parse_flags(["--list", "--tag=moe"]).given["tag"] == ("moe",)
    assert parse_flags(["--tag=moe", "--list", "--tag", "lm"]).given["tag"] == ("moe", "lm")
    assert refusal("--list", "--tag=") == "--tag=: expected NAME."


def test_wide_belongs_to_list():
    assert parse_flags(["--list", "--wide"]).given["wide"]
    assert "--list" in refusal("--wide")


def test_a_number_that_may_be_off():
    assert parse_flags([EXP]).options.hung_step_timeout_secs == 1800
    assert parse_flags([EXP, "--hung_step_timeout_secs=off"]).options.hung_step_timeout_secs is None
    assert parse_flags([EXP, "--hung_step_timeout_secs=60"]).options.hung_step_timeout_secs == 60


def test_several_steps():
    words = ["--mode=decode_once", "--restore_checkpoint_step=200,100,200"]
    options = parse_flags([EXP, *words]).options
    assert options.restore_checkpoint_step == (200, 100)
    options = parse_flags([EXP, "--restore_checkpoint_step=0"]).options
    assert (options.restore_checkpoint_step, options.only_restore_step) == ((0,), 0)
    assert parse_flags([EXP]).options.only_restore_step is None


def test_what_is_done_beside_training():
    options = parse_flags([EXP]).options
    assert (options.eval_on_test, options.decode_during_train) == (True, False)
    options = parse_flags([EXP, "--noeval_on_test", "--decode_during_train"]).options
    assert (options.eval_on_test, options.decode_during_train) == (False, True)
    words = ["--mode=decode", "--eval_during_decode", "--follow_timeout_secs=60"]
    options = parse_flags([EXP, *words]).options
    assert (options.eval_during_decode, options.follow_timeout_secs) == (True, 60)


def test_a_table_of_a_tool_is_read_beside_the_flags_of_the_runner():
    rows = [
        Flag("nodes", positive, "how many", "N", default=1),
        Flag("sbatch", lambda text: text, "another option", "OPTION", repeats=True),
        Flag("dry_run", bool, "print", default=False),
    ]
    words = ["--exp", "lm.Small", "--nodes", "2", "--fdl.A", "-1", "--sbatch=--qos=high", "--json"]
    given, others = read_flags([*words, "--sbatch=a", "--dry_run"], rows, known_only=True)
    assert given == {"nodes": 2, "sbatch": ("--qos=high", "a"), "dry_run": True}
    assert others == ["--exp", "lm.Small", "--fdl.A", "-1", "--json"]
    with pytest.raises(UsageError, match=r"^--nodes=0: expected a positive integer\.$"):
        read_flags(["--nodes=0"], rows, known_only=True)
    with pytest.raises(UsageError, match=r"no flag --dri_run; did you mean '--dry_run'\?"):
        read_flags(["--dri_run"], rows)


def test_flags_that_libraries_define_through_absl_are_not_ours():
    absl_flags.DEFINE_string("job_log_dir", "theirs", "of a library")
    try:
        assert parse_flags([EXP, "--job_log_dir=ours"]).options.job_log_dir == "ours"
        assert "verbosity" in absl_flags.FLAGS
        assert refusal(EXP, "--verbosity=1") == "there is no flag --verbosity."
    finally:
        delattr(absl_flags.FLAGS, "job_log_dir")
