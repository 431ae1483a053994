"""Draw docs/pictures/life_of_a_batch.svg from a traced training step of the quickstart.

    python scripts/life_of_a_batch.py

The script trains two steps of `lm.quickstart.LocalText` in a temporary folder, records what each
stage receives and returns, and draws the stages from top to bottom. Run it again when a stage
changes; the picture is committed. It needs the extra `layerkit-runner[plots]`.
"""

from __future__ import annotations

import io
import math
import tempfile
from pathlib import Path
from typing import Any

import jax
from flax.traverse_util import flatten_dict

from layerkit.config import build
from layerkit_experiments.lm.quickstart import LocalText
from layerkit_runner import cli
from layerkit_runner.run.resolve import resolve
from layerkit_runner.step.metrics import GLOBAL_BATCH

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "pictures" / "life_of_a_batch.svg"


def shape(value: Any) -> str:
    """Return dtype and shape of an array, such as `int32 [8, 128]`."""
    return f"{value.dtype} {list(value.shape)}"


def trace() -> list[tuple[str, str, list[str]]]:
    """Return (stage, code that runs it, facts) of each stage of the second step."""
    experiment = LocalText(MAX_STEPS=2, CHECKPOINT_EVERY_N_STEPS=2)
    resolved = resolve(experiment)
    config = next(config for config in resolved.datasets if config.is_training)
    rows = int(config.percore_batch_size)
    reader = build(config.clone(batch_size=rows, percore_batch_size=None))
    batch = reader.get_next()
    train, heldout = (reader._pieces(split) for split in ("train", "heldout"))
    text = "".join(reader.ids_to_strings(batch.ids[:1], lengths=[40]))
    stages = [
        (
            "Files",
            "TEXT_FILES",
            [
                f"{len(train):,} files of source code and documentation for training",
                f"{len(heldout)} more files are held out for evaluation",
            ],
        ),
        (
            "Input",
            "LocalText.get_next()",
            [
                f"{name}: {shape(batch[name])}"
                for name in sorted(batch)
                if hasattr(batch[name], "shape")
            ]
            + [f"row 0 begins {text!r}"],
        ),
    ]
    stages.append(
        ("Devices", "SpmdPartitioner", ["the same arrays, rows sharded over data × fsdp"])
    )
    task = build(resolved.task)
    state = task.init_state(task.first_key())
    stages.append(("Model", "LanguageModel.compute_predictions", model_facts(task, state, batch)))
    model = task.model.clone(train=True)
    (metrics, outputs), _ = jax.eval_shape(
        lambda variables: model.apply(
            variables, batch, rngs={"random": jax.random.key(0)}, mutable=["aux_loss"]
        ),
        {"params": state.params},
    )
    stages.append(
        (
            "Loss",
            "LanguageModel.compute_loss",
            [f"metrics: {', '.join(sorted(metrics))}, each a weighted mean"]
            + [f"{name}: {shape(value)}" for name, value in sorted(outputs.items())],
        )
    )
    stages.append(step_facts(task, state, batch))
    stages.append(("Files of the job", "CheckpointManager, observers", folder_facts()))
    return stages


def model_facts(task: Any, state: Any, batch: Any) -> list[str]:
    """Return the outputs of the layers of the network, in the order in which they are computed.

    Flax records them in a traced call. Its record is a dictionary that JAX sorts by name.
    """
    lm = task.model.clone(train=True)
    order: list[tuple[str, ...]] = []

    def is_output(module: Any, method: str) -> bool:
        if method == "fprop":
            order.append(module.path)
        return method == "fprop"

    def run(params: Any) -> Any:
        _, result = lm.apply(
            {"params": params},
            batch,
            rngs={"random": jax.random.key(0)},
            capture_intermediates=is_output,
            mutable=["intermediates", "aux_loss"],
        )
        return result["intermediates"]

    result = flatten_dict(jax.eval_shape(run, state.params))
    facts = []
    for path, values in sorted(result.items(), key=lambda item: order.index(item[0][:-1])):
        name = "/".join(path[:-1])
        value = values[0]
        if len(path) <= 4 and hasattr(value, "shape"):
            facts.append(f"{name}: {shape(value)}")
    logits = jax.eval_shape(
        lambda params: lm.clone(train=False).apply(
            {"params": params}, batch.ids, method=lambda model, ids: model.lm.logits(ids)
        ),
        state.params,
    )
    return [*facts, f"logits: {shape(logits)}"]


def step_facts(task: Any, state: Any, batch: Any) -> tuple[str, str, list[str]]:
    """Return the stage of gradients and update."""
    new, (metrics, scalars) = jax.jit(lambda s, b: task.train_step(s, b, GLOBAL_BATCH))(
        state, dict_of(batch)
    )
    sizes = {
        name: sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(getattr(new, name)))
        for name in ("params", "opt_state")
    }
    norm = float(scalars["learning/raw_grad_norm"])
    return (
        "Gradient and update",
        "SingleTask.train_step, Learner.update",
        [
            f"gradient: {sizes['params']:,} numbers, norm {norm:.3f}",
            f"optimizer state: {sizes['opt_state']:,} numbers",
            f"loss {float(metrics['loss'].value):.4f}; step {int(state.step)} → {int(new.step)}",
        ],
    )


def dict_of(batch: Any) -> Any:
    """Return the batch with device arrays."""
    return jax.tree.map(jax.numpy.asarray, batch)


def folder_facts() -> list[str]:
    """Return the files that a run of two steps writes."""
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--fdl.MAX_STEPS=2", "--fdl.CHECKPOINT_EVERY_N_STEPS=2", "--noeval_on_test"]
        status = cli.main(["--exp=lm.quickstart.LocalText", f"--job_log_dir={folder}", *flags])
        assert status == 0, status
        top = sorted(path.name for path in Path(folder).iterdir() if not path.name.startswith("."))
        step = next(Path(folder).glob("checkpoints/checkpoint_*"))
        parts = ", ".join(sorted(path.name for path in step.iterdir() if path.is_dir()))
    return [", ".join(top[:6]), ", ".join(top[6:]), f"{step.name}: {parts}"]


def draw(stages: list[tuple[str, str, list[str]]]) -> None:
    """Write the picture."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "life", "font.size": 10})
    from matplotlib import pyplot as plt

    heights = [0.62 + 0.2 * len([fact for fact in facts if fact]) for _, _, facts in stages]
    total = sum(heights) + 0.3 * (len(stages) - 1)
    figure = plt.figure(figsize=(7.2, total + 0.2))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, 7.2), ylim=(0, total + 0.2))
    axes.axis("off")
    top = total + 0.1
    for index, ((name, code, facts), height) in enumerate(zip(stages, heights, strict=True)):
        box = plt.Rectangle((0.1, top - height), 7.0, height, fc="#f2f6fc", ec="#3465a4", lw=1.2)
        axes.add_patch(box)
        axes.text(0.25, top - 0.24, name, weight="bold", va="center")
        axes.text(6.95, top - 0.24, code, va="center", ha="right", family="monospace", size=9)
        for line, fact in enumerate(fact for fact in facts if fact):
            axes.text(0.4, top - 0.52 - 0.2 * line, fact, va="center", size=9)
        top -= height
        if index + 1 < len(stages):
            axes.annotate(
                "",
                (3.6, top - 0.3),
                (3.6, top),
                arrowprops={"arrowstyle": "->", "color": "#3465a4"},
            )
            top -= 0.3
    PICTURE.parent.mkdir(exist_ok=True)
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    PICTURE.write_text("\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n")


if __name__ == "__main__":
    result = trace()
    for name, code, facts in result:
        print(f"{name} ({code})", *facts, sep="\n  ")
    draw(result)
