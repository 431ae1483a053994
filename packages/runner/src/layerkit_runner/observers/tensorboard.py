"""Summaries for TensorBoard, written by tensorboardX without TensorFlow.

Folders below the job's folder, as in Pax:

    summaries                          hyperparameters and the configuration of a training run
    summaries/train                    scalars, histograms and images of the training steps
    summaries/eval_train               evaluation on the training data
    summaries/eval_test_<name>         evaluation on the held-out data set <name>
    summaries/decode_test_<name>       metrics and a sample of the decoded data set <name>
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import textwrap
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from etils import epath

from layerkit_runner.files.atomic_write import naming_path
from layerkit_runner.observers.base import DECODE_PREFIX, Histogram, Observer, RunInfo

if TYPE_CHECKING:
    from tensorboardX.record_writer import RecordWriter

_SECONDS_BETWEEN_FLUSHES = 30


class TensorBoard(Observer):
    """An observer that writes scalars, histograms, images and texts as TensorBoard events.

    A resumed run begins new event files, with a mark that hides earlier events after its start
    step. Remote stores require their client, such as google-cloud-storage for `gs://`.
    """

    def __init__(self) -> None:
        """Create the observer without open files."""
        self._summaries: epath.Path | None = None
        self._purge_step: int | None = None
        self._files: dict[str, RecordWriter] = {}
        self._next_flush = 0.0

    def start(self, info: RunInfo) -> None:
        """Set the folder; each file is created by its first event."""
        if info.job_log_dir is not None:
            self._summaries = info.job_log_dir / "summaries"
            # Only a resumed training run repeats steps, whose earlier events must be hidden.
            self._purge_step = info.start_step + 1 if info.mode == "train" else None
        if info.mode == "train" and info.config:
            self._add_config(info.start_step, info.config)

    def train_metrics(self, step: int, scalars: Mapping[str, float]) -> None:
        """Write the scalars to `summaries/train`."""
        self._add_scalars("train", step, scalars)

    def eval_metrics(self, step: int, dataset: str, scalars: Mapping[str, float]) -> None:
        """Write the scalars to the folder of the data set."""
        self._add_scalars(eval_folder(dataset), step, scalars)

    def histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """Write norms and histograms to `summaries/train`."""
        self._add_histograms("train", step, histograms)

    def eval_histograms(self, step: int, dataset: str, histograms: Mapping[str, Histogram]) -> None:
        """Write norms and histograms to the folder of the data set."""
        self._add_histograms(eval_folder(dataset), step, histograms)

    def images(self, step: int, images: Mapping[str, np.ndarray]) -> None:
        """Write the images to `summaries/train`."""
        from tensorboardX import summary

        for name, image in images.items():
            self._add("train", step, summary.image(name, image, dataformats="HWC"))

    def text(self, step: int, name: str, text: str) -> None:
        """Write the text, verbatim, to the folder of the decoded data set."""
        from tensorboardX import summary

        folder = eval_folder(DECODE_PREFIX + name)
        self._add(folder, step, summary.text("sample", _verbatim(text)))

    def rollback(self, step: int, facts: Mapping[str, float]) -> None:
        """Begin new files, with a mark that hides the events after `step`."""
        del facts
        self._close_files()
        self._purge_step = step + 1

    def flush(self) -> None:
        """Flush all files."""
        self._next_flush = time.monotonic() + _SECONDS_BETWEEN_FLUSHES
        for file in self._files.values():
            with naming_path(self._summaries or ""):
                file.flush()

    def close(self) -> None:
        """Close all files."""
        self._summaries = None
        self._close_files()

    def _close_files(self) -> None:
        with contextlib.ExitStack() as stack:  # closes all, even if one fails
            while self._files:
                stack.callback(self._files.popitem()[1].close)

    def _add_config(self, step: int, config: Mapping[str, Any]) -> None:
        """Write the hyperparameters of a run and a text of its configuration.

        The tab HPARAMS shows them with the last values of all scalars below the folder.
        """
        from tensorboardX import summary

        values, overrides = config["config"], config["overrides"]
        deep = {path: values.get(path, text) for path, text in overrides.items() if "." in path}
        chosen = {"experiment": config["experiment"], **config["fields"], **deep}
        hparams = {
            name: value if isinstance(value, bool | int | float | str) else repr(value)
            for name, value in chosen.items()
        }
        # Without a list of metrics TensorBoard shows all, also those of jobs beside this one.
        _, session, _ = summary.hparams(hparams, {})
        self._add("", step, session)
        lines = [f"{path} = {value!r}" for path, value in {**chosen, **values}.items()]
        self._add("", step, summary.text("config", _verbatim("\n".join(lines))))

    def _add_scalars(self, folder: str, step: int, scalars: Mapping[str, float]) -> None:
        from tensorboardX.proto.summary_pb2 import Summary

        # One event for all scalars; `tensorboardX.summary.scalar` takes four times as long.
        values = [Summary.Value(tag=_tag(n), simple_value=float(x)) for n, x in scalars.items()]
        self._add(folder, step, Summary(value=values))

    def _add_histograms(self, folder: str, step: int, histograms: Mapping[str, Histogram]) -> None:
        from tensorboardX import summary

        for name, histogram in histograms.items():
            # TensorBoard shows a tag in one tab only, so the norm has a tag of its own.
            self._add(folder, step, summary.scalar(f"{name}/norm", histogram.norm))
            if histogram.is_finite:
                stored = summary.histogram_raw(
                    name,
                    min=histogram.edges[0],
                    max=histogram.edges[-1],
                    num=histogram.counts.sum(),
                    sum=histogram.sum,
                    sum_squares=histogram.sum_of_squares,
                    bucket_limits=histogram.edges[1:],
                    bucket_counts=histogram.counts,
                )
                self._add(folder, step, stored)

    def _add(self, folder: str, step: int, summary: Any) -> None:
        if self._summaries is None:
            return
        if folder not in self._files:
            self._new_file(folder, os.fspath(self._summaries / folder))
        self._write(folder, step=step, summary=summary)
        if time.monotonic() >= self._next_flush:
            self.flush()

    def _new_file(self, folder: str, path: str) -> None:
        # A `RecordWriter` raises errors, such as those of a full disk, in this thread. In a
        # `SummaryWriter` they would end its own thread, and adding an event would wait forever.
        # This import takes a second if tensorboardX imports PyTorch.
        from tensorboardX.proto.event_pb2 import SessionLog
        from tensorboardX.record_writer import RecordWriter, directory_check

        directory_check(path)
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        self._files[folder] = RecordWriter(os.path.join(path, name))
        self._next_flush = 0.0  # flush the first event, so that TensorBoard shows the run
        self._write(folder, file_version="brain.Event:2")
        if self._purge_step is not None:
            restart = SessionLog(status=SessionLog.START)
            self._write(folder, step=self._purge_step, session_log=restart)

    def _write(self, folder: str, **fields: Any) -> None:
        from tensorboardX.proto.event_pb2 import Event

        with naming_path(self._summaries or ""):
            self._files[folder].write(Event(wall_time=time.time(), **fields).SerializeToString())


def _verbatim(text: str) -> str:
    # TensorBoard renders Markdown, in which four spaces mark verbatim text.
    return textwrap.indent(text, "    ")


def _tag(name: str) -> str:
    return re.sub(r"[^-/\w.]", "_", name).lstrip("/")


def eval_folder(dataset: str) -> str:
    """Return the summary folder of a data set; 'train' and 'train/…' are training data.

    >>> eval_folder('train'), eval_folder('c4/en'), eval_folder('decode/prompts')
    ('eval_train', 'eval_test_c4_en', 'decode_test_prompts')
    """
    kind, name = "eval_test", dataset
    if dataset.startswith(DECODE_PREFIX):
        kind, name = "decode_test", dataset.removeprefix(DECODE_PREFIX)
    elif dataset == "train" or dataset.startswith("train/"):
        kind, name = "eval", dataset
    return f"{kind}_" + re.sub(r"[^\w.-]", "_", name)
