"""The command `runner` as a process: output, exit codes, and what it imports.

The experiments here are made for the tests. A folder before all others on the path holds modules
called `jax` and `fiddle` that end the process when they are imported, so that an answer proves that
it needed neither.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from layerkit_runner.config.help import help_text
from layerkit_runner.run_options import MODES

_FILES = {
    # Hides the project's own experiments, so that the screens below stay as they are.
    "site/layerkit_experiments/__init__.py": "",
    "site/layerkit_experiments/catalogue.json": "{}",
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
    "tools/acme_tools-1.0.dist-info/METADATA": (
        "Metadata-Version: 2.1\nName: acme-tools\nVersion: 1.0\n"
    ),
    "tools/acme_tools-1.0.dist-info/entry_points.txt": (
        "[layerkit.commands]\ncount = acme_tools:MODE\nsay = acme_tools:SAY\n"
        "function = acme_tools:count\n"
        "typo = acme_tools:MODES\nhalf = half:MODE\nlost = nowhere:MODE\nrude = rude:MODE\n"
    ),
    "tools/half.py": "def run(:\n",
    "tools/rude.py": "raise KeyError('PORT')\n",
    "tools/acme_tools.py": """
        from layerkit_runner import Command, Flag, Mode


        def count(resolved, options):
            print(len(resolved.datasets) * options.extra["times"], options.json)
            return 3


        def say(words):
            print(*words)
            return 4


        TIMES = Flag("times", int, "how often", "N", default=1)
        MODE = Mode("count the data sets", count, flags=(TIMES,), uses=("json",))
        SAY = Command("say it", say)
    """,
    "site/acme/catalogue.json": json.dumps(
        {
            name: {"num_params": None, "mesh": None, "data": None, "summary": summary, "tags": tags}
            for name, summary, tags in (
                ("lm.Large", "The same, but larger.", ["lm"]),
                ("lm.Small", "A model for tests.", ["lm", "small"]),
                ("vision.Small", "Another of that name.", ["lm", "vision"]),
            )
        }
    ),
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
    "no_jax/rich.py": "raise SystemExit('rich was imported')",
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


def usage_error(place: Path, *arguments: str, before_import: bool = True) -> str:
    """Return the message of a command that is refused, in one line."""
    done = runner(place, *arguments, "--job_log_dir=out", before_import=before_import)
    assert (done.stdout, done.returncode, done.stderr.count("\n")) == ("", 2, 1), done.stderr
    return done.stderr


def test_help_matches_the_golden(place: Path):
    done = runner(place, "--help", before_import=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == help_text() + "\n"
    topics = [(), *((topic,) for topic in ("all", *MODES, "inspect", "plan", "doctor"))]
    pages = [
        f"$ runner --help {' '.join(topic)}".rstrip() + f"\n{help_text(*topic)}\n"
        for topic in topics
    ]
    golden = Path(__file__).parent / "help.txt"
    # To rewrite it, delete it and run this test.
    if not golden.exists():
        golden.write_text("\n".join(pages))
    assert golden.read_text() == "\n".join(pages)


def test_list_prints_the_catalogue_and_filters_by_all_tags(place: Path):
    def listed(*words: str) -> str:
        done = runner(place, "--list", *words, before_import=True)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    assert listed() == (
        "lm.Large      The same, but larger.\n"
        "lm.Small      A model for tests.\n"
        "vision.Small  Another of that name.\n"
    )
    assert listed("--tag=small") == "lm.Small  A model for tests.\n"
    assert listed("--tag=lm") == listed()
    assert listed("--tag=lm", "--tag=vision") == "vision.Small  Another of that name.\n"
    both = ("--tag=small", "--tag=vision")
    assert listed(*both) == "No experiment has all of the tags small, vision.\n"
    assert listed(*both, "--json") == "[]\n"


def test_list_shows_facts_of_the_catalogue(place: Path):
    file = place / "site" / "acme" / "catalogue.json"
    before = file.read_text()
    lines = json.loads(before)
    lines["lm.Large"] |= {"num_params": 1_300_000_000, "mesh": "fsdp 64", "data": "C4"}
    lines["lm.Small"] |= {"mesh": "one device", "data": "made-up tokens"}
    file.write_text(json.dumps(lines))
    try:
        listed = runner(place, "--list", before_import=True).stdout
        as_json = json.loads(runner(place, "--list", "--json", before_import=True).stdout)
        file.unlink()
        imported = runner(place, "--list").stdout
    finally:
        file.write_text(before)
    assert listed == (
        "lm.Large      1.3B  fsdp 64     C4              The same, but larger.\n"
        "lm.Small      —     one device  made-up tokens  A model for tests.\n"
        "vision.Small                                    Another of that name.\n"
    )
    assert as_json == [
        {"name": name, "class": f"acme.{name}"} | line for name, line in lines.items()
    ]
    assert imported == runner(place, "--list").stdout


def test_reduced_sets_the_reduced_fields(place: Path):
    def printed(*words: str) -> str:
        return runner(place, "--exp=lm.Small", "--print_config", *words).stdout

    assert "experiment.NUM_LAYERS = 2\n" in printed("--noreduced")
    assert "experiment.NUM_LAYERS = 1\n" in printed("--reduced")
    assert "task.model.num_layers = 3\n" in printed("--reduced", "--fdl.NUM_LAYERS=3")
    recorded = runner(place, "--exp=lm.Small", "--print_config", "--json", "--reduced")
    assert json.loads(recorded.stdout)["overrides"] == {"NUM_LAYERS": "1"}
    words = ("--exp=vision.Small", "--print_config", "--reduced")
    assert "reduced_fields" in usage_error(place, *words, before_import=False)


@pytest.mark.parametrize(
    ("arguments", "fact"),
    [
        ([], "name the experiment by --exp"),
        (["--exp=lm.Small", "--enable_checkpoint_savin=False"], "'--enable_checkpoint_saving'"),
        (["--fdl_config=Small"], "acme.lm.Small, acme.vision.Small"),
        (["--list", "--tag=lm", "--tag=visoin"], "'vision'"),
        (["deploy", "--job_log_dir=out"], "unknown command: 'deploy'. Choices: doctor, launch"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_wrong_word_exits_before_anything_is_imported(place: Path, arguments: list[str], fact: str):
    assert fact in usage_error(place, *arguments)


@pytest.mark.parametrize(
    ("arguments", "fact"),
    [
        (["--exp=own.Mien"], "'own.Mine'"),
        (["--exp=lm.Small", "--fdl.NUM_LAYRES=3"], "'NUM_LAYERS'"),
        (["--exp=lm.Small", "--fdl.task.model.num_layerz=3"], "'num_layers'"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                (["--exp=lm.Small", "--tfds_data_dir=/data", "--mode=plan"], "'TFDS_DATA_DIR'"),
                (["--exp=lm.Small", "--fdl.NUM_LAYERS=0"], "Small: NUM_LAYERS=0"),
                (["--exp=lm.Small", "--diff_config=lm.Lareg"], "--diff_config='lm.Lareg'"),
            ]
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_wrong_field_exits_before_jax_is_imported(place: Path, arguments: list[str], fact: str):
    assert fact in usage_error(place, *arguments, before_import=False)


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
    flags = ["--num_processes=4", "--mode=eval_once", "--restore_checkpoint_step=3"]
    done = runner(place, *command, *flags, "--print_config")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == inspected.stdout
    done = runner(place, *command, "--print_config", "--json")
    assert json.loads(done.stdout)["config"]["task.model.num_layers"] == 7


@pytest.mark.parametrize(
    ("flags", "kept"),
    [
        (["--init_from=/models/a b", "--init_draw=.*/norm", "--noenable_checkpoint_saving"], None),
        # The folder is for whoever runs it to say, and `--json` is about the printing.
        (["--job_log_dir=/runs/1", "--restore_cast_dtypes"], ["--restore_cast_dtypes"]),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ([], []),
                (["--mode=eval_once", "--restore_checkpoint_step=3,4"], None),
                (["--mode=inspect"], []),
            ]
        ),
    ],
)
def test_printed_arguments_contain_the_flags_of_the_run(
    place: Path, flags: list[str], kept: list[str] | None
):
    command = ["--exp=own.Mine", "--fdl.NUM_LAYERS=7"]
    done = runner(place, *command, *flags, "--print_config", "--json")
    assert done.stderr == ""
    printed = json.loads(done.stdout)["arguments"]
    assert printed[:2] == command
    assert sorted(printed[2:]) == sorted(flags if kept is None else kept)


@pytest.fixture
def tools(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Add the package of tools to the path."""
    paths = [str(place / "tools"), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))


@pytest.mark.usefixtures("tools")
def test_package_adds_mode_and_command(place: Path):
    def answered(*words: str) -> tuple[int, str]:
        done = runner(place, *words)
        return done.returncode, done.stdout + done.stderr

    mode = ("--exp=own.Mine", "--mode=count")
    assert answered(*mode) == (3, "1 False\n")
    assert answered(*mode, "--times=2", "--json") == (3, "2 True\n")
    assert answered("say", "--what", "you=like") == (4, "--what you=like\n")
    lines = [line.split() for line in runner(place, "--help", "all").stdout.splitlines()]
    assert ["count", "count", "the", "data", "sets"] in lines
    assert ["runner", "say", "say", "it"] in lines
    assert "--times=N  how often (default 1)" in runner(place, "--help", "count").stdout
    for words, fact in (
        ((*mode, "--tims=2"), "'--times'"),
        (("--exp=own.Mine", "--times=2", "--mode=inspect"), "'--times'"),
        (("--exp=own.Mine", "--mode=cuont"), "'count'"),
        (("--exp=own.Mine", "--mode=say"), "is a Command, not a Mode. Use: runner say"),
        (("count",), "is a Mode, not a Command. Use: --mode=count"),
        (("study",), "is a FlagCommand, not a Command. Use: --study"),
    ):
        code, text = answered(*words)
        assert code == 2 and fact in text


def test_interrupt_exits_with_130(place: Path):
    done = runner(place, "--exp=own.Interrupted", "--mode=inspect")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.usefixtures("tools")
def test_entry_point_that_cannot_be_loaded_is_named_and_harms_no_other(place: Path):
    causes = {
        "typo": "acme_tools:MODES: AttributeError",
        "half": "half:MODE: SyntaxError: invalid syntax (half.py, line 1)",
        "lost": "nowhere:MODE: ModuleNotFoundError: No module named 'nowhere'",
        "rude": "rude:MODE: KeyError: 'PORT'",
    }
    for words in (("--help",), ("--help", "all")):
        shown = runner(place, *words)
        assert (shown.returncode, shown.stderr) == (0, "")
        for mode, cause in causes.items():
            assert f"  {mode}: cannot be loaded: {cause}" in shown.stdout
    for mode, part in {**causes, "function": "acme_tools:count"}.items():
        assert part in usage_error(place, "--exp=own.Mine", f"--mode={mode}", before_import=False)
