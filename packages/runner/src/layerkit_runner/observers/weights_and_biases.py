"""Reports to Weights & Biases, which require the extra `wandb`.

The job's folder stores the id of the run, so a resumed job continues the same run. wandb's
environment variables, such as WANDB_ENTITY, WANDB_API_KEY and WANDB_MODE=offline, apply.
"""

from __future__ import annotations

import contextlib
import html
import importlib.util
import netrc
import os
import secrets
import shlex
import tempfile
import urllib.parse
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from layerkit.errors import pip_install
from layerkit_runner.errors import UsageError
from layerkit_runner.files.atomic_write import atomic_write, is_remote
from layerkit_runner.observers.base import DECODE_PREFIX, Histogram, Observer, RunInfo


class WeightsAndBiases(Observer):
    """An observer that writes scalars, texts, images and histograms to a run of a project.

    Names are `train/…`, `eval/<data set>/…` and `decode/<data set>/…`, and `vars/…` for histograms
    of weights. The x-axis is `step`. Steps that are repeated after a kill are reported again.

    Raises:
      UsageError: wandb is not installed, or has no key.
    """

    # An upload of the last files may take minutes.
    close_timeout_secs = 600.0

    def __init__(
        self, project: str, *, config: Mapping[str, Any], report: Callable[[str], None]
    ) -> None:
        """Store the settings and look for a key; see the class for the arguments."""
        if importlib.util.find_spec("wandb") is None:
            raise UsageError(
                field="--wandb_project",
                value=project,
                expected="wandb to be installed",
                hint=f"Install it: {pip_install('layerkit-runner', 'wandb')}",
            )
        if not _has_key():
            raise UsageError(
                "wandb has no key",
                field="--wandb_project",
                value=project,
                expected="a login: run `wandb login`, or set WANDB_API_KEY",
                hint="Without an account, WANDB_MODE=offline writes the run to the job folder.",
            )
        self._project = project
        self._config = dict(config)
        self._report = report
        self._run: Any = None
        self._unsent: str | None = None  # folder of an offline run, its only copy

    def start(self, info: RunInfo) -> None:
        """Create the run of a job, or resume it."""
        if info.job_log_dir is None or info.mode not in ("train", "lm_eval"):
            return
        import wandb  # about a second

        directory = info.job_log_dir
        id_file = directory / "wandb_run_id.txt"
        if not id_file.exists():
            atomic_write(id_file, secrets.token_hex(4) + "\n")
        # wandb appends to its files, which a remote store does not support.
        is_local = not is_remote(directory)
        self._run = wandb.init(
            project=self._project,
            id=id_file.read_text().strip(),
            name=directory.name,
            resume="allow",
            dir=os.fspath(directory) if is_local else tempfile.mkdtemp(prefix="wandb"),
            config={**self._config, "num_params": info.num_params},
            # Capturing the output would break the progress bar.
            settings=wandb.Settings(console="off", silent=True),
        )
        # wandb's default count of steps rejects repeated steps.
        self._run.define_metric("*", step_metric="step")
        if self._run.offline:
            self._unsent = self._run.settings.sync_dir
            self._report(f"wandb        offline run in {self._unsent}")
        elif self._run.url is not None:  # None if wandb is disabled
            self._report(f"wandb        {self._run.url}")

    def train_metrics(self, step: int, scalars: Mapping[str, float]) -> None:
        """Log the scalars as `train/…`."""
        self._log(step, {f"train/{name}": value for name, value in scalars.items()})

    def eval_metrics(self, step: int, dataset: str, scalars: Mapping[str, float]) -> None:
        """Log the scalars as `eval/<data set>/…` or `decode/<data set>/…`."""
        folder = _eval_folder(dataset)
        self._log(step, {f"{folder}/{name}": value for name, value in scalars.items()})

    def histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """Log the norms of all arrays, and the histograms that are finite."""
        if self._run is None:
            return
        import wandb

        values: dict[str, Any] = {}
        for name, histogram in histograms.items():
            values[f"{name}/norm"] = histogram.norm
            if histogram.is_finite:
                values[name] = wandb.Histogram(np_histogram=(histogram.counts, histogram.edges))
        self._log(step, values)

    def eval_histograms(self, step: int, dataset: str, histograms: Mapping[str, Histogram]) -> None:
        """Log the histograms as `eval/<data set>/…` or `decode/<data set>/…`."""
        folder = _eval_folder(dataset)
        self.histograms(step, {f"{folder}/{name}": h for name, h in histograms.items()})

    def images(self, step: int, images: Mapping[str, np.ndarray]) -> None:
        """Log the images as `train/…`."""
        if self._run is None:
            return
        import wandb

        self._log(step, {f"train/{name}": wandb.Image(image) for name, image in images.items()})

    def text(self, step: int, name: str, text: str) -> None:
        """Log the text as `decode/<data set>/sample`."""
        if self._run is None:
            return
        import wandb

        self._log(step, {f"decode/{name}/sample": wandb.Html(f"<pre>{html.escape(text)}</pre>")})

    def close(self) -> None:
        """Finish the run, and print the command that sends an offline run."""
        run, self._run = self._run, None
        if run is not None:
            run.finish()
        if self._unsent is not None:
            self._report(f"wandb: to send the offline run: wandb sync {shlex.quote(self._unsent)}")

    def _log(self, step: int, values: Mapping[str, Any]) -> None:
        if self._run is not None:
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
