"""The command as people meet it: whole screens, from a real process.

The experiments here are made for the tests. A folder before everything else on the path holds
modules called `jax` and `fiddle` that end the process when they are imported; so an answer proves
that it came without them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from layerkit_runner import cli
from layerkit_runner.command_line.flags import help_text

_FILES = {
    # Hides the project's own experiments, so that the screens below stay as they are.
    "site/layerkit_experiments/__init__.py": "",
    "site/acme/__init__.py": "",
    "site/acme-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n",
    "site/acme-1.0.dist-info/entry_points.txt": "[layerkit.experiments]\nacme = acme\n",
    "site/acme/lm.py": '''
        import dataclasses

        from layerkit.config import Config
        from layerkit_runner import BaseExperiment


        @dataclasses.dataclass
        class Lm:
            num_layers: int = 2
            dtype: str = "float32"


        @dataclasses.dataclass
        class Task:
            model: Lm
            learning_rate: float = 1e-3


        @dataclasses.dataclass
        class Input:
            batch_size: int
            is_training: bool = True


        @dataclasses.dataclass
        class Mesh:
            shape: tuple[int, ...] = (1, 1, 1)


        class Base(BaseExperiment, abstract=True):
            """What all of them share."""

            tags = ("lm",)
            NUM_LAYERS: int = 2
            ICI_MESH_SHAPE: tuple[int, ...] = (1, 1, 1)

            def validate(self):
                if self.NUM_LAYERS < 1:
                    raise ValueError(f"NUM_LAYERS={self.NUM_LAYERS} must be at least 1")

            def task(self):
                return Config(Task, model=Config(Lm, num_layers=self.NUM_LAYERS))

            def datasets(self):
                return [Config(Input, batch_size=4)]

            def partitioner(self):
                return Config(Mesh, shape=self.ICI_MESH_SHAPE)


        class Small(Base):
            """A model for tests."""

            tags = ("small",)
            reduced_fields = {"NUM_LAYERS": 1}


        class Large(Base):
            """The same, but larger."""

            NUM_LAYERS = 48
    ''',
    "site/acme/vision.py": '''
        from acme.lm import Base


        class Small(Base):
            """Another of that name."""

            tags = ("vision",)
    ''',
    "work/own.py": '''
        from acme.lm import Base


        class Mine(Base):
            """In the folder where the command runs."""


        class Interrupted(Base):
            """Somebody presses Ctrl-C while it is being set up."""

            def task(self):
                raise KeyboardInterrupt
    ''',
    "no_jax/jax.py": "raise SystemExit('jax was imported')",
    "no_config/fiddle.py": "raise SystemExit('fiddle was imported')",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    for name, text in _FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    return folder


def runner(
    place: Path, *arguments: str, before_import: bool = False
) -> subprocess.CompletedProcess[str]:
    """Runs the command; `before_import` also forbids what any experiment needs to be imported."""
    folders = [place / "site", place / "no_jax"]
    if before_import:
        folders.append(place / "no_config")
    path = os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")])
    before = {file: file.stat().st_mtime_ns for file in place.rglob("*")}
    done = subprocess.run(
        [sys.executable, "-m", "layerkit_runner.cli", *arguments],
        cwd=place / "work",
        env={**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert {file: file.stat().st_mtime_ns for file in place.rglob("*")} == before
    return done


def refused(place: Path, *arguments: str, before_import: bool = True) -> str:
    done = runner(place, *arguments, "--job_log_dir=out", before_import=before_import)
    assert done.stdout == ""
    assert done.returncode == 2
    return done.stderr


def test_help(place: Path):
    done = runner(place, "--help", before_import=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == _HELP.lstrip("\n")
    assert done.stdout == help_text() + "\n"


_HELP = """
runner trains, evaluates and inspects experiments.

  runner --exp=lm.quickstart.LocalText --job_log_dir=DIR
  runner --exp=lm.pile.Pile126M --fdl.NUM_LAYERS=2 --mode=inspect
  runner --exp=lm.pile.Pile126M --fdl.task.model.lm_tpl.num_layers=2 --mode=plan
  runner --list
  runner doctor

Modes:
  train        train; the same command again resumes
  eval         evaluate each new checkpoint of a job that trains, until its last one
  eval_once    evaluate the newest checkpoint, or those of --restore_checkpoint_step
  decode       decode with each new checkpoint of a job that trains, until its last one
  decode_once  decode with the newest checkpoint, or those of --restore_checkpoint_step
  export       write the newest checkpoint as a Hugging Face folder
  plan         compile the training step without the devices; print memory and traffic
  inspect      print the configuration, every override applied, its layers, its weights, its graph,
               or what the inputs feed; writes nothing

Commands:
  doctor  look at this machine: devices, packages, storage; exit code 1: something does not work
  launch  start a run on this machine, Slurm, TPUs or Kubernetes, or print what would be; `runner
          launch` tells more

Flags:
  --exp=NAME                        the experiment, such as lm.quickstart.LocalText; see --list
  --fdl_config=NAME                 the same as --exp
  --fdl.NAME=VALUE                  set a field of the experiment, or by its path any deeper one
  --reduced                         the experiment at a size for this machine, as it defines it;
                                    --fdl.NAME=VALUE still wins
  --tfds_data_dir=DIR               folder of TensorFlow Datasets; the same as
                                    --fdl.TFDS_DATA_DIR=DIR
  --job_log_dir=DIR                 folder for everything the run writes
  --mode=MODE                       what to do, see above (default train)
  --[no]enable_checkpoint_saving    train: whether to save checkpoints (default True)
  --restore_checkpoint_dir=DIR      train, eval, eval_once, decode, decode_once, export: start from
                                    the checkpoints of this folder
  --restore_checkpoint_step=STEP    train, eval_once, decode_once, export: start from this step, not
                                    the newest; eval_once and decode_once take several, as in
                                    100,200
  --init_from=DIR                   train: begin with the weights of this folder: of a job, a
                                    checkpoint, or Hugging Face; a run that goes on does not read it
  --init_draw=PATTERN               train: weights that --init_from leaves to be drawn, as a regular
                                    expression
  --restore_cast_dtypes             train, eval, eval_once, decode, decode_once, export: convert
                                    floating-point arrays of a checkpoint whose dtype is another, as
                                    after a change of the weights' dtype
  --async_timeout_secs=SECONDS      train: end a job whose save takes longer (default 600)
  --exit_after_ondemand_checkpoint  train: leave after the save that SIGUSR1 asks for, instead of
                                    going on
  --[no]eval_on_test                train: whether held-out data are evaluated, or left to
                                    --mode=eval beside this job (default True)
  --decode_during_train             train: where task.train.decode_interval_steps is None, decode as
                                    often as is saved, not only at the end
  --eval_during_decode              decode, decode_once: also evaluate
  --follow_timeout_secs=SECONDS     eval, decode: end when no new checkpoint came for so long; off:
                                    never
  --pmap_use_tensorstore            train, eval, eval_once, decode, decode_once: save pmap runs one
                                    entry per parameter, not as one file; reading finds out by
                                    itself
  --target=TARGET                   plan: the devices to plan for, which need not be here: cpux256,
                                    h100x256, v5p:8x8x4, 2xv4-128, or here for those that are; the
                                    number may be left to the mesh, as in h100
  --num_devices=N                   plan, inspect: how many of them
  --plan_effort=EFFORT              plan: full: a TPU's program is compiled as for a run; quick:
                                    with less effort, a third of the time, unless it needs nearly
                                    all memory (default quick)
  --search                          plan: plan other meshes and policies of rematerialisation too,
                                    and rank those that fit
  --max_compilations=N              plan: how many plans a search compiles, or advice on one that
                                    does not fit; 0: no advice (default 12)
  --max_seconds=SECONDS             plan: after so long, a search or advice compiles nothing more
                                    (default 600.0)
  --inspect=WHAT                    inspect: config, the configuration; layers, each with the values
                                    that it is built with; parameters, a table of the weights;
                                    graph, the configuration as a Mermaid diagram; or batches, a few
                                    of each input (default config)
  --num_batches=N                   inspect: batches of each input (default 2)
  --num_hosts=N                     inspect: hosts among which inputs are split (default 1)
  --json                            plan, inspect: print the plan, the configuration, the layers,
                                    the weights, the list of experiments or what the doctor found as
                                    JSON
  --export_dir=DIR                  export: the folder to write
  --jax_compilation_cache=DIR       folder for compiled programs, or off
  --coordinator_address=ADDRESS     train, eval, eval_once, decode, decode_once: host:port where the
                                    processes of a job meet, at process 0; auto: found out. Without
                                    it, what Slurm, Open MPI, torchrun, Kubernetes or a TPU pod says
  --num_processes=N                 train, eval, eval_once, decode, decode_once: how many processes
                                    the job has
  --process_id=I                    train, eval, eval_once, decode, decode_once: which of them this
                                    is, from 0
  --multiprocess_gpu                train, eval, eval_once, decode, decode_once: one of several
                                    processes; Pax's names --server_addr, --num_hosts and --host_idx
                                    are understood
  --hung_step_timeout_secs=SECONDS  train, eval, eval_once, decode, decode_once: end a job that made
                                    no step, batch or save for so long; off: never (default 1800)
  --peak_tflops_per_device=TFLOPS   train: what one device could do at best, for MFU, where the
                                    table of known devices has no figure or another
  --xla_flags_preset=NAME           train, plan: a set of compiler flags: gpu_latency_hiding,
                                    gpu_pipelined_collectives, tpu_v5e_collective_fusion, tpu_fsdp,
                                    tpu_multislice, tpu_v6e_dense or tpu_v6e_moe
  --pgle_profile=FILE               train: a profile of earlier steps that guides the scheduler of
                                    NVIDIA GPUs
  --jax_profiler_port=PORT          train: where xprof or TensorBoard can ask for a trace at any
                                    time
  --wandb_project=NAME              train: also report to this project of Weights & Biases
  --study=FILE                      train: search fields of the experiment as this TOML or JSON file
                                    says, each trial a run in DIR/trials; started several times,
                                    several trials run at once
  --num_trials=N                    train: how many trials the study has in all, in place of what
                                    its file says
  --study_storage=URL               train: a database, or a journal file for a network disk, in
                                    place of DIR/study.db
  --[no]enable_summary_writer       train, eval, eval_once, decode, decode_once: whether to write
                                    DIR/summaries for TensorBoard (default True)
  --print_config                    print the configuration, every override applied, and leave; can
                                    be added to any command
  --diff_config=OTHER               print the fields that differ from those of another experiment or
                                    of a job's folder, and leave; exit code 0: none, 1: some
  --list                            print every experiment with its weights, mesh and data, and
                                    leave
  --tag=NAME                        of --list, only experiments with this tag, such as moe; given
                                    several times, with all of them
  --help                            print this and leave

VALUE is a Python literal; bare words are strings: 4, 1e-3, [1,4,1], None, bfloat16.
Exit codes: 0 done, 2 wrong command line or fields, 130 stopped by Ctrl-C and 143 by
SIGTERM; a training run that is stopped saves first, and the same command resumes it.
SIGUSR1 makes it save at once and go on. 1: a checkpoint could not be written. 70:
nothing moved for --hung_step_timeout_secs. 75: another process of the job was lost.
"""


def test_flags_against_the_launcher(place: Path, monkeypatch: pytest.MonkeyPatch):
    launched = {"JOB_ID": "4711", "STEP_NODELIST": "node1", "NTASKS": "8", "PROCID": "3"}
    for name, value in launched.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    text = "--num_processes=4, but Slurm (job 4711) says SLURM_NTASKS=8. Leave the flag out: it is"
    assert text in refused(place, "--exp=lm.Large", "--num_processes=4")


def test_list(place: Path):
    done = runner(place, "--list", before_import=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == (
        "lm.Large      The same, but larger.\n"
        "lm.Small      A model for tests.\n"
        "vision.Small  Another of that name.\n"
    )


def test_list_of_what_has_all_tags(place: Path):
    def listed(*words: str) -> str:
        done = runner(place, "--list", *words, before_import=True)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    assert listed("--tag=small") == "lm.Small  A model for tests.\n"
    assert listed("--tag=lm") == listed()
    assert listed("--tag=lm", "--tag=vision") == "vision.Small  Another of that name.\n"
    both = ("--tag=small", "--tag=vision")
    assert listed(*both) == "No experiment has all of the tags small, vision.\n"
    assert listed(*both, "--json") == "[]\n"


def test_list_of_a_package_with_a_catalogue(place: Path):
    lines = {
        "lm.Large": {"num_params": 1_300_000_000, "mesh": "fsdp 64, data 2 across", "data": "C4"},
        "lm.Small": {"num_params": None, "mesh": "one device", "data": "made-up tokens"},
    }
    tags = {"lm.Large": ["lm"], "lm.Small": ["lm", "small"], "vision.Small": ["lm", "vision"]}
    file = place / "site" / "acme" / "catalogue.json"
    file.write_text(json.dumps(lines))
    try:
        listed = runner(place, "--list", before_import=True).stdout
        as_json = json.loads(runner(place, "--list", "--json", before_import=True).stdout)
        file.write_text("{broken")
        broken = runner(place, "--list", before_import=True)
    finally:
        file.unlink()
    assert listed == (
        "lm.Large      1.30B  fsdp 64, data 2 across  C4              The same, but larger.\n"
        "lm.Small      —      one device              made-up tokens  A model for tests.\n"
        "vision.Small                                                 Another of that name.\n"
    )
    summaries = ("The same, but larger.", "A model for tests.", "Another of that name.")
    nothing = {"num_params": None, "mesh": None, "data": None}
    assert as_json == [
        {"name": name, "class": f"acme.{name}", "summary": summary}
        | lines.get(name, nothing)
        | {"tags": tags[name]}
        for name, summary in zip(tags, summaries, strict=True)
    ]
    assert (broken.returncode, broken.stdout) == (2, "")
    assert "catalogue.json is not a catalogue of experiments: " in broken.stderr


def test_reduced(place: Path):
    def printed(*words: str) -> str:
        return runner(place, "--exp=lm.Small", "--print_config", *words).stdout

    assert "experiment.NUM_LAYERS = 2\n" in printed()
    assert "experiment.NUM_LAYERS = 1\n" in printed("--reduced")
    assert "task.model.num_layers = 3\n" in printed("--reduced", "--fdl.NUM_LAYERS=3")
    recorded = runner(place, "--exp=lm.Small", "--print_config", "--json", "--reduced")
    assert json.loads(recorded.stdout)["overrides"] == {"NUM_LAYERS": "1"}
    text = "runner: --reduced: vision.Small does not say how it is made smaller (reduced_fields);"
    words = ("--exp=vision.Small", "--print_config", "--reduced")
    assert text in refused(place, *words, before_import=False)


_WRONG = {
    "no experiment": ([], "which experiment? Say --exp=NAME; `runner --list` shows all.\n"),
    "flag": (
        ["--exp=lm.Small", "--enable_checkpoint_savin=False"],
        "there is no flag --enable_checkpoint_savin; did you mean '--enable_checkpoint_saving'?\n",
    ),
    "dash for underscore": (
        ["--exp=lm.Small", "--restore-checkpoint-dir=x"],
        "there is no flag --restore-checkpoint-dir; did you mean '--restore_checkpoint_dir'?\n",
    ),
    "no TFDS data": (
        ["--exp=lm.Small", "--tfds_data_dir=/data", "--mode=plan"],
        "--tfds_data_dir: lm.Small reads no data of TensorFlow Datasets; it has no field"
        " TFDS_DATA_DIR.\n",
    ),
    "mode": (
        ["--exp=lm.Small", "--mode=trian"],
        "--mode has no value 'trian'; did you mean 'train'? It is one of train, eval, eval_once,"
        " decode, decode_once, export, plan, inspect.\n",
    ),
    "experiment": (
        ["--exp=lm.Smal"],
        "there is no experiment 'lm.Smal'; did you mean 'lm.Small'? `runner --list` shows all.\n",
    ),
    "ambiguous experiment": (
        ["--fdl_config=Small"],
        "--exp=Small is ambiguous; it can be any of\n  acme.lm.Small\n  acme.vision.Small\n",
    ),
    "own experiment": (
        ["--exp=own.Mien"],
        "module own has no experiment 'Mien'; did you mean 'Mine'? It has: Mine, Interrupted.\n",
    ),
    "abstract experiment": (
        ["--exp=lm.Base"],
        "lm.Base is only a base for other experiments (declared abstract, or named with an"
        " underscore); `runner --list` shows those that run.\n",
    ),
    "experiment field": (
        ["--exp=lm.Small", "--fdl.NUM_LAYRES=3"],
        "lm.Small has no field 'NUM_LAYRES'; did you mean 'NUM_LAYERS'? Its fields: NUM_LAYERS,"
        " ICI_MESH_SHAPE.\n",
    ),
    "type": (
        ["--exp=lm.Small", "--fdl.NUM_LAYERS=three"],
        "lm.Small.NUM_LAYERS: expected int, got 'three'\n",
    ),
    "tag": (
        ["--list", "--tag=lm", "--tag=visoin"],
        "--tag has no value 'visoin'; did you mean 'vision'? It is one of lm, small, vision.\n",
    ),
    "tag without a list": (
        ["--exp=lm.Small", "--tag=small"],
        "--tag=small chooses among what --list shows; add --list.\n",
    ),
    "command": (["docter"], "unexpected argument 'docter'; did you mean 'doctor'?\n"),
    "command after a flag": (
        ["--json", "doctor"],
        "`doctor` comes before all flags: runner doctor …\n",
    ),
    "other experiment": (
        ["--exp=lm.Small", "--diff_config=lm.Lareg"],
        "--diff_config: there is no experiment 'lm.Lareg'; did you mean 'lm.Large'? `runner --list`"
        " shows all.\n",
    ),
    "other folder": (
        ["--exp=lm.Small", "--diff_config=./out"],
        "--diff_config=./out: no config.json there. A folder that a training run wrote to has one."
        " ([Errno 2] No such file or directory: './out/config.json')\n",
    ),
    "two ways to look": (
        ["--exp=lm.Small", "--print_config", "--diff_config=lm.Large"],
        "--print_config prints one configuration, --diff_config compares two.\n",
    ),
    "flag of another look": (
        ["--exp=lm.Small", "--mode=inspect", "--inspect=graph", "--num_batches=3"],
        "--num_batches belongs to --inspect=batches, and this is graph.\n",
    ),
    "literal": (
        ["--exp=lm.Small", "--fdl.ICI_MESH_SHAPE=[1,4,1"],
        "lm.Small.ICI_MESH_SHAPE: expected tuple[int, ...], got '[1,4,1', which is not a complete"
        " Python literal\n",
    ),
    "contradiction": (
        ["--exp=lm.Small", "--fdl.NUM_LAYERS=3", "--fdl.NUM_LAYERS=4"],
        "--fdl.NUM_LAYERS=3 and --fdl.NUM_LAYERS=4 contradict each other; keep one of them.\n",
    ),
    "root of a path": (
        ["--exp=lm.Small", "--fdl.taks.model.num_layers=3"],
        "--fdl.taks.model.num_layers: a path starts with task, datasets, decode_datasets,"
        " partitioner, train_programs, eval_programs, decode_programs or executor, not 'taks'; did"
        " you mean 'task'?\n",
    ),
}


@pytest.mark.parametrize("mistake", _WRONG)
def test_mistakes_answered_before_anything_is_imported(place: Path, mistake: str):
    arguments, text = _WRONG[mistake]
    assert refused(place, *arguments) == f"runner: {text}"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            ["--fdl.task.model.num_layerz=3"],
            "--fdl.task.model.num_layerz: task.model is a config of Lm, which has no field"
            " 'num_layerz'; did you mean 'num_layers'? Its fields: num_layers, dtype.\n",
        ),
        (
            ["--fdl.task.model.num_layers=three"],
            "--fdl.task.model.num_layers: expected int, got 'three'\n",
        ),
        (
            ["--fdl.datasets.1.batch_size=3"],
            "--fdl.datasets.1.batch_size: datasets has no element 1; it has 1 elements, 0 to 0.\n",
        ),
        (
            ["--fdl.NUM_LAYERS=0"],
            "Small cannot run as asked: NUM_LAYERS=0 must be at least 1\n",
        ),
    ],
)
def test_mistakes_answered_before_jax_is_imported(place: Path, arguments: list[str], text: str):
    stderr = refused(place, "--exp=lm.Small", *arguments, before_import=False)
    assert stderr == f"runner: {text}"


def test_a_folder_to_write_to_is_asked_for(place: Path):
    done = runner(place, "--exp=lm.Small", before_import=True)
    assert done.returncode == 2
    assert done.stderr == "runner: --mode=train needs a folder to write to: --job_log_dir=DIR\n"


def test_inspect_prints_the_resolved_configuration_and_writes_nothing(place: Path):
    done = runner(
        place,
        "--exp=own.Mine",
        "--mode=inspect",
        "--fdl.NUM_LAYERS=7",
        "--fdl.ICI_MESH_SHAPE=[1,4,1]",
        "--fdl.task.model.dtype",
        "bfloat16",
        "--fdl.datasets.0.batch_size=16",
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == textwrap.dedent(
        """\
        experiment = own.Mine
        experiment.NUM_LAYERS = 7
        experiment.ICI_MESH_SHAPE = (1, 4, 1)
        task = Task
        task.model = Lm
        task.model.num_layers = 7
        task.model.dtype = 'bfloat16'
        task.learning_rate = 0.001
        datasets.0 = Input
        datasets.0.batch_size = 16
        datasets.0.is_training = True
        decode_datasets = []
        partitioner = Mesh
        partitioner.shape = (1, 4, 1)
        """
    )


def test_print_config_can_be_added_to_any_command(place: Path):
    command = ["--exp=own.Mine", "--fdl.NUM_LAYERS=7"]
    inspected = runner(place, *command, "--mode=inspect")
    # Neither a folder nor the other processes are needed for it.
    for flags in (["--num_processes=4"], ["--mode=eval_once", "--restore_checkpoint_step=3"]):
        done = runner(place, *command, *flags, "--print_config")
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout == inspected.stdout
    done = runner(place, *command, "--print_config", "--json")
    assert json.loads(done.stdout)["config"]["task.model.num_layers"] == 7


@pytest.mark.parametrize(
    ("flags", "kept"),
    [
        ([], []),
        (["--init_from=/models/a b", "--init_draw=.*/norm", "--noenable_checkpoint_saving"], None),
        # The folder is for whoever runs it to say, and `--json` is about the printing.
        (["--job_log_dir=/runs/1", "--restore_cast_dtypes"], ["--restore_cast_dtypes"]),
        (["--mode=eval_once", "--restore_checkpoint_step=3,4"], None),
        (["--mode=inspect"], []),
    ],
)
def test_the_printed_arguments_hold_the_flags_of_the_run(
    place: Path, flags: list[str], kept: list[str] | None
):
    command = ["--exp=own.Mine", "--fdl.NUM_LAYERS=7"]
    done = runner(place, *command, *flags, "--print_config", "--json")
    assert done.stderr == ""
    printed = json.loads(done.stdout)["arguments"]
    assert printed[:2] == command
    assert sorted(printed[2:]) == sorted(flags if kept is None else kept)


def test_diff_config(place: Path):
    done = runner(place, "--exp=own.Mine", "--fdl.NUM_LAYERS=7", "--diff_config=lm.Large")
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout == textwrap.dedent(
        """\
        here   own.Mine
        there  acme.lm.Large

        field                  here  there
        experiment.NUM_LAYERS  7     48
        task.model.num_layers  7     48

        2 of 13 fields differ
        """
    )
    done = runner(place, "--exp=own.Mine", "--fdl.NUM_LAYERS=48", "--diff_config=lm.Large")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "nothing differs")


def test_the_graph_needs_no_jax(place: Path):
    done = runner(place, "--exp=own.Mine", "--mode=inspect", "--inspect=graph")
    assert (done.returncode, done.stderr) == (0, "")
    assert '  n1 -->|"model"| n2' in done.stdout.splitlines()


def test_an_interrupt_before_the_run_has_an_exit_code_of_its_own(place: Path):
    done = runner(place, "--exp=own.Interrupted", "--mode=inspect")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_main_returns_the_exit_code(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["--mode=trian"]) == 2
    assert capsys.readouterr().err.startswith("runner: --mode has no value 'trian'")
    assert cli.main(["--help"]) == 0
