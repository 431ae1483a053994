"""Reports to Weights & Biases and to trackio, which require the extras `wandb` and `trackio`.

The job's folder stores the id of the run, so a resumed job continues the same run. The environment
variables of the libraries, such as WANDB_ENTITY, WANDB_MODE=offline and TRACKIO_DIR, apply.
"""

from __future__ import annotations

import abc
import contextlib
import html
import importlib
import importlib.util
import netrc
import os
import secrets
import shlex
import tempfile
import urllib.parse
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np

from layerkit.errors import pip_install
from layerkit_runner.errors import UsageError
from layerkit_runner.files.atomic_write import atomic_write, is_remote
from layerkit_runner.observers.base import DECODE_PREFIX, Histogram, Observer, RunInfo


class Tracker(Observer):
    """An observer that writes scalars, texts, images and histograms to a run of a project.

    Names are `train/…`, `eval/<data set>/…` and `decode/<data set>/…`, and `vars/…` for histograms
    of weights. Steps that are repeated after a kill are reported again.

    Attributes:
      library: Module with the classes `Histogram`, `Image` and `Html` of wandb, and name of the
        extra that installs it.

    Raises:
      UsageError: The library is not installed, or has no key.
    """

    # An upload of the last files may take minutes.
    close_timeout_secs = 600.0
    library: ClassVar[str]

    def __init__(self, project: str, *, report: Callable[[str], None]) -> None:
        """Store the project and `report`, which prints a line."""
        if importlib.util.find_spec(self.library) is None:
            raise UsageError(
                field=f"--{self.library}_project",
                value=project,
                expected=f"{self.library} to be installed",
                hint=f"Install it: {pip_install('layerkit-runner', self.library)}",
            )
        self._project = project
        self._report = report
        self._run: Any = None

    def start(self, info: RunInfo) -> None:
        """Create the run of a job, or resume it."""
        self._module = importlib.import_module(self.library)  # about a second
        directory: Any = info.job_log_dir
        id_file = directory / f"{self.library}_run_id.txt"
        if not id_file.exists():
            atomic_write(id_file, secrets.token_hex(4) + "\n")
        config = {**info.config.get("config", {}), "num_params": info.num_params}
        self._run = self._begin(directory, id_file.read_text().strip(), config)

    def train_metrics(self, step: int, scalars: Mapping[str, float]) -> None:
        """Log the scalars as `train/…`."""
        self._log(step, _below("train", scalars))

    def eval_metrics(self, step: int, dataset: str, scalars: Mapping[str, float]) -> None:
        """Log the scalars as `eval/<data set>/…` or `decode/<data set>/…`."""
        self._log(step, _below(_eval_folder(dataset), scalars))

    def histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """Log the norms of all arrays, and the histograms that are finite."""
        values: dict[str, Any] = {}
        for name, histogram in histograms.items():
            values[f"{name}/norm"] = histogram.norm
            if histogram.is_finite:
                bins = histogram.counts, histogram.edges
                values[name] = self._module.Histogram(np_histogram=bins)
        self._log(step, values)

    def eval_histograms(self, step: int, dataset: str, histograms: Mapping[str, Histogram]) -> None:
        """Log the histograms as `eval/<data set>/…` or `decode/<data set>/…`."""
        self.histograms(step, _below(_eval_folder(dataset), histograms))

    def images(self, step: int, images: Mapping[str, np.ndarray]) -> None:
        """Log the images as `train/…`."""
        drawn = {name: self._module.Image(image) for name, image in images.items()}
        self._log(step, _below("train", drawn))

    def text(self, step: int, name: str, text: str) -> None:
        """Log the text as `decode/<data set>/sample`."""
        page = self._module.Html(f"<pre>{html.escape(text)}</pre>")
        self._log(step, {f"decode/{name}/sample": page})

    def close(self) -> None:
        """Finish the run."""
        if self._run is not None:
            self._run.finish()

    @abc.abstractmethod
    def _begin(self, directory: Any, run_id: str, config: dict[str, Any]) -> Any:
        """Create or resume the run of a job folder, and return it."""

    def _log(self, step: int, values: dict[str, Any]) -> None:
        self._run.log(values, step=step)


class Trackio(Tracker):
    """An observer that writes a run to the local database of trackio, or to its Space."""

    library = "trackio"

    def _begin(self, directory: Any, run_id: str, config: dict[str, Any]) -> Any:
        # The name identifies the run. A notebook gets no dashboard, which would be a server.
        named = {"name": f"{directory.name}-{run_id}", "config": config}
        return self._module.init(self._project, resume="allow", embed=False, **named)


class WeightsAndBiases(Tracker):
    """An observer that writes to a run of Weights & Biases, whose x-axis is `step`."""

    library = "wandb"

    def __init__(self, project: str, *, report: Callable[[str], None]) -> None:
        """Store the settings and look for a key; see the base class for the arguments."""
        super().__init__(project, report=report)
        if not _has_key():
            raise UsageError(
                "wandb has no key",
                field="--wandb_project",
                value=project,
                expected="a login: run `wandb login`, or set WANDB_API_KEY",
                hint="Without an account, WANDB_MODE=offline writes the run to the job folder.",
            )
        self._unsent: str | None = None  # folder of an offline run, its only copy

    def _begin(self, directory: Any, run_id: str, config: dict[str, Any]) -> Any:
        # wandb appends to its files, which a remote store does not support.
        is_local = not is_remote(directory)
        run = self._module.init(
            project=self._project,
            id=run_id,
            name=directory.name,
            resume="allow",
            dir=os.fspath(directory) if is_local else tempfile.mkdtemp(prefix="wandb"),
            config=config,
            # Capturing the output would break the progress bar.
            settings=self._module.Settings(console="off", silent=True),
        )
        # wandb's default count of steps rejects repeated steps.
        run.define_metric("*", step_metric="step")
        if run.offline:
            self._unsent = run.settings.sync_dir
            self._report(f"wandb        offline run in {self._unsent}")
        elif run.url is not None:  # None if wandb is disabled
            self._report(f"wandb        {run.url}")
        return run

    def close(self) -> None:
        """Finish the run, and print the command that sends an offline run."""
        super().close()
        if self._unsent is not None:
            self._report(f"wandb: to send the offline run: wandb sync {shlex.quote(self._unsent)}")

    def _log(self, step: int, values: dict[str, Any]) -> None:
        self._run.log({"step": step, **values})


def _has_key() -> bool:
    """Return whether wandb needs no key, or has one where it looks for it."""
    environ, machines = os.environ, set[str]()
    if any(environ.get(name) for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")):
        return True
    if environ.get("WANDB_MODE", "online") != "online":
        return True
    with contextlib.suppress(OSError, netrc.NetrcParseError):
        machines = set(netrc.netrc(environ.get("NETRC")).hosts)
    if any(machine.endswith("wandb.ai") for machine in machines):
        return True
    import wandb  # about a second

    settings = wandb.setup().settings  # those of its files, such as of `wandb offline`
    server = urllib.parse.urlsplit(settings.base_url).netloc
    return settings.mode != "online" or bool(settings.api_key) or server in machines


def _eval_folder(dataset: str) -> str:
    return dataset if dataset.startswith(DECODE_PREFIX) else f"eval/{dataset}"


def _below(folder: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{folder}/{name}": value for name, value in values.items()}
