"""Summaries for TensorBoard, written by tensorboardX and thus without TensorFlow.

Folders below the job's folder, as Pax users know them:

    summaries/train                    scalars, histograms and images of the training steps
    summaries/eval_train               evaluation on the training data
    summaries/eval_test_<name>         evaluation on the held-out data set <name>
    summaries/decode_test_<name>       what was decoded of the data set <name>: metrics, a sample
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping

import numpy as np
from etils import epath

from layerkit_runner.observers.background import Background
from layerkit_runner.observers.base import DECODE_PREFIX, Histogram, Observer, RunInfo
from layerkit_runner.observers.event_file import EventFile

_SECONDS_BETWEEN_FLUSHES = 30


class TensorBoard(Observer):
    """Writes scalars, histograms, images and texts as TensorBoard events, in the background.

    A resumed run begins new event files that tell TensorBoard to hide what an earlier run logged
    after the step it resumes from. On remote stores tensorboardX needs the store's own client, such
    as google-cloud-storage for `gs://`.
    """

    optional = True

    def __init__(self) -> None:
        self._writers: _Writers | None = None
        self._background = Background()

    def start(self, info: RunInfo) -> None:
        if info.job_log_dir is not None:
            # An evaluation job meets one checkpoint after another, and takes nothing back.
            purge_step = info.start_step + 1 if info.mode == "train" else None
            self._writers = _Writers(info.job_log_dir / "summaries", purge_step)

    def train_metrics(self, step: int, scalars: Mapping[str, float]) -> None:
        if self._writers is not None:
            self._background.submit(self._writers.add_scalars, "train", step, dict(scalars))

    def eval_metrics(self, step: int, dataset: str, scalars: Mapping[str, float]) -> None:
        if self._writers is not None:
            folder = eval_folder(dataset)
            self._background.submit(self._writers.add_scalars, folder, step, dict(scalars))

    def histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        if self._writers is not None:
            self._background.submit(self._writers.add_histograms, "train", step, histograms)

    def eval_histograms(self, step: int, dataset: str, histograms: Mapping[str, Histogram]) -> None:
        if self._writers is not None:
            folder = eval_folder(dataset)
            self._background.submit(self._writers.add_histograms, folder, step, histograms)

    def images(self, step: int, images: Mapping[str, np.ndarray]) -> None:
        if self._writers is not None:
            self._background.submit(self._writers.add_images, "train", step, images)

    def text(self, step: int, name: str, text: str) -> None:
        if self._writers is not None:
            folder = eval_folder(DECODE_PREFIX + name)
            self._background.submit(self._writers.add_text, folder, step, "sample", text)

    def flush(self) -> None:
        if self._writers is not None:
            self._background.submit(self._writers.flush)

    def close(self) -> None:
        writers, self._writers = self._writers, None
        try:
            self._background.close()
        finally:
            if writers is not None:
                writers.close()


class _Writers:
    """One event file for each folder, made when first needed."""

    def __init__(self, summaries: epath.Path, purge_step: int | None) -> None:
        self._summaries = summaries
        self._purge_step = purge_step
        self._files: dict[str, EventFile] = {}

    def add_scalars(self, folder: str, step: int, scalars: Mapping[str, float]) -> None:
        from tensorboardX.proto.summary_pb2 import Summary

        # One event for all. By `tensorboardX.summary.scalar` it would take four times as long.
        values = [
            Summary.Value(tag=_tag(name), simple_value=float(scalars[name])) for name in scalars
        ]
        self._file(folder).add(step, Summary(value=values))

    def add_histograms(self, folder: str, step: int, histograms: Mapping[str, Histogram]) -> None:
        from tensorboardX import summary

        file = self._file(folder)
        for name, histogram in histograms.items():
            # Not the tag of the histogram: TensorBoard shows a tag in one of its tabs only.
            file.add(step, summary.scalar(f"{name}/norm", histogram.norm))
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
                file.add(step, stored)

    def add_images(self, folder: str, step: int, images: Mapping[str, np.ndarray]) -> None:
        from tensorboardX import summary

        for name, image in images.items():
            self._file(folder).add(step, summary.image(name, image, dataformats="HWC"))

    def add_text(self, folder: str, step: int, name: str, text: str) -> None:
        from tensorboardX import summary

        # TensorBoard renders Markdown: four spaces keep the text as it is.
        verbatim = "\n".join("    " + line for line in text.splitlines())
        self._file(folder).add(step, summary.text(name, verbatim))

    def flush(self) -> None:
        for file in self._files.values():
            file.flush()

    def close(self) -> None:
        with contextlib.ExitStack() as stack:  # closes all, though one may fail
            for file in self._files.values():
                stack.callback(file.close)

    def _file(self, folder: str) -> EventFile:
        if folder not in self._files:
            self._files[folder] = EventFile(
                os.fspath(self._summaries / folder),
                flush_secs=_SECONDS_BETWEEN_FLUSHES,
                purge_step=self._purge_step,
            )
        return self._files[folder]


def _tag(name: str) -> str:
    """A name with the characters that TensorBoard allows, as tensorboardX writes it."""
    return re.sub(r"[^-/\w.]", "_", name).lstrip("/")


def eval_folder(dataset: str) -> str:
    """The summary folder of an evaluated data set; 'train' and 'train/…' mean training data.

    >>> eval_folder('train'), eval_folder('held_out'), eval_folder('c4/en')
    ('eval_train', 'eval_test_held_out', 'eval_test_c4_en')
    >>> eval_folder('train/web')
    'eval_train_web'
    >>> eval_folder('decode/prompts')
    'decode_test_prompts'
    """
    kind, name = "eval_test", dataset
    if dataset.startswith(DECODE_PREFIX):
        kind, name = "decode_test", dataset.removeprefix(DECODE_PREFIX)
    elif dataset == "train" or dataset.startswith("train/"):
        kind, name = "eval", dataset
    return f"{kind}_" + re.sub(r"[^\w.-]", "_", name)
