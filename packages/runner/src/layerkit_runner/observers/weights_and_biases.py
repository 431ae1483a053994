"""Reports to Weights & Biases, where the extra `wandb` is installed.

The id of the run stays in the job's folder, so a job that is resumed goes on in the same run there.
Whom it belongs to and whether it is sent at once is said by wandb's own environment variables, such
as WANDB_ENTITY, WANDB_API_KEY and WANDB_MODE=offline.
"""

from __future__ import annotations

import html
import importlib.util
import os
import secrets
import shlex
import shutil
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from etils import epath

from layerkit_runner.errors import UsageError
from layerkit_runner.files.atomic_write import atomic_write
from layerkit_runner.observers.background import Background
from layerkit_runner.observers.base import Histogram, Observer, RunInfo

_STEP = "step"


class WeightsAndBiases(Observer):
    """Writes scalars, texts and histograms to a run of a project, all of it in the background.

    Names are `train/…`, `eval/<data set>/…` and `decode/<data set>/…`, over `step`. Steps that are
    done again after a kill are reported again.

    Args:
      project: Its name.
      config: What the run is made with, by path.
      report: Takes a line for people, which says where the run is.

    Raises:
      UsageError: wandb is not installed.
    """

    optional = True

    def __init__(
        self, project: str, *, config: Mapping[str, Any], report: Callable[[str], None]
    ) -> None:
        if importlib.util.find_spec("wandb") is None:
            raise UsageError(
                f"--wandb_project={project} needs wandb: pip install 'layerkit-runner[wandb]'"
            )
        self._project = project
        self._config = dict(config)
        self._report = report
        self._background = Background()
        self._run: Any = None
        self._temporary: str | None = None
        # The folder of an offline run, which holds what is still to be sent.
        self._unsent: str | None = None

    def start(self, info: RunInfo) -> None:
        if info.job_log_dir is not None and info.mode == "train":
            self._background.submit(self._begin, info, info.job_log_dir)

    def train_metrics(self, step: int, scalars: Mapping[str, float]) -> None:
        self._submit(step, {f"train/{name}": value for name, value in scalars.items()})

    def eval_metrics(self, step: int, dataset: str, scalars: Mapping[str, float]) -> None:
        prefix = dataset if "/" in dataset else f"eval/{dataset}"
        self._submit(step, {f"{prefix}/{name}": value for name, value in scalars.items()})

    def histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        self._background.submit(self._log_histograms, step, histograms)

    def eval_histograms(self, step: int, dataset: str, histograms: Mapping[str, Histogram]) -> None:
        named = {f"eval/{dataset}/{name}": value for name, value in histograms.items()}
        self._background.submit(self._log_histograms, step, named)

    def images(self, step: int, images: Mapping[str, np.ndarray]) -> None:
        self._background.submit(self._log_images, step, images)

    def text(self, step: int, name: str, text: str) -> None:
        self._background.submit(self._log_text, step, name, text)

    def close(self) -> None:
        try:
            self._background.submit(self._finish)
        finally:
            self._background.close()
        if self._unsent is not None:
            self._report(f"wandb: to send the offline run: wandb sync {shlex.quote(self._unsent)}")

    def _submit(self, step: int, values: dict[str, Any]) -> None:
        self._background.submit(self._log, {_STEP: step, **values})

    # What follows runs in the background.

    def _begin(self, info: RunInfo, directory: epath.Path) -> None:
        import wandb  # about a second

        # It writes files of its own as they grow, which a remote store cannot take.
        if "://" in os.fspath(directory):
            self._temporary = tempfile.mkdtemp(prefix="wandb")
        self._run = wandb.init(
            project=self._project,
            id=_run_id(directory),
            name=directory.name,
            resume="allow",
            dir=os.fspath(directory) if self._temporary is None else self._temporary,
            config={**self._config, "num_params": info.num_params},
            # Its capture of the output would get in the way of the progress bar.
            settings=wandb.Settings(console="off", silent=True),
        )
        # Its own count of steps only grows, and would refuse those that are done again.
        self._run.define_metric("*", step_metric=_STEP)
        if self._run.offline:
            self._unsent = self._run.settings.sync_dir
            self._report(f"wandb        offline run in {self._unsent}")
        elif self._run.url is not None:  # as it is where wandb is disabled
            self._report(f"wandb        {self._run.url}")

    def _log(self, values: dict[str, Any]) -> None:
        if self._run is not None:
            self._run.log(values)

    def _log_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        import wandb

        values: dict[str, Any] = {_STEP: step}
        for name, histogram in histograms.items():
            values[f"{name}/norm"] = histogram.norm
            if histogram.is_finite:
                values[name] = wandb.Histogram(np_histogram=(histogram.counts, histogram.edges))
        self._log(values)

    def _log_images(self, step: int, images: Mapping[str, np.ndarray]) -> None:
        import wandb

        drawn = {f"train/{name}": wandb.Image(image) for name, image in images.items()}
        self._log({_STEP: step, **drawn})

    def _log_text(self, step: int, name: str, text: str) -> None:
        import wandb

        self._log(
            {_STEP: step, f"decode/{name}/sample": wandb.Html(f"<pre>{html.escape(text)}</pre>")}
        )

    def _finish(self) -> None:
        if self._run is not None:
            self._run.finish()
        # What was not sent stays, there being no other copy.
        if self._temporary is not None and self._unsent is None:
            shutil.rmtree(self._temporary, ignore_errors=True)


def _run_id(directory: epath.Path) -> str:
    """The id of the job's run, the same whenever it is resumed."""
    path = directory / "wandb_run_id.txt"
    if not path.exists():
        atomic_write(path, secrets.token_hex(4) + "\n")
    return path.read_text().strip()
