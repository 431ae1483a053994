"""Summaries for TensorBoard, written by tensorboardX and thus without TensorFlow.

Folders below the job's folder, as Pax users know them:

    summaries/train                    scalars of the training steps, histograms of the weights
    summaries/eval_train               evaluation on the training data
    summaries/eval_test_<name>         evaluation on the held-out data set <name>
    summaries/decode_test_<name>       what was decoded of the data set <name>: metrics, a sample
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from etils import epath

from layerkit_runner.observers.background import Background
from layerkit_runner.observers.base import DECODE_PREFIX, Histogram, Observer, RunInfo

if TYPE_CHECKING:
    import tensorboardX

_SECONDS_BETWEEN_FLUSHES = 30


class TensorBoard(Observer):
    """Writes scalars, histograms and texts as TensorBoard events, all of it in the background.

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
            if writers is not None:
                self._background.submit(writers.close)
        finally:
            self._background.close()


class _Writers:
    """One tensorboardX writer for each folder, made when first needed."""

    def __init__(self, summaries: epath.Path, purge_step: int | None) -> None:
        self._summaries = summaries
        self._purge_step = purge_step
        self._writers: dict[str, tensorboardX.SummaryWriter] = {}

    def add_scalars(self, folder: str, step: int, scalars: Mapping[str, float]) -> None:
        writer = self._writer(folder)
        for name, value in scalars.items():
            writer.add_scalar(name, float(value), step)

    def add_histograms(self, folder: str, step: int, histograms: Mapping[str, Histogram]) -> None:
        writer = self._writer(folder)
        for name, histogram in histograms.items():
            # Not the tag of the histogram: TensorBoard shows a tag in one of its tabs only.
            writer.add_scalar(f"{name}/norm", histogram.norm, step)
            if histogram.is_finite:
                writer.add_histogram_raw(
                    name,
                    min=histogram.edges[0],
                    max=histogram.edges[-1],
                    num=histogram.counts.sum(),
                    sum=histogram.sum,
                    sum_squares=histogram.sum_of_squares,
                    bucket_limits=histogram.edges[1:],
                    bucket_counts=histogram.counts,
                    global_step=step,
                )

    def add_text(self, folder: str, step: int, name: str, text: str) -> None:
        # TensorBoard renders Markdown: four spaces keep the text as it is.
        verbatim = "\n".join("    " + line for line in text.splitlines())
        self._writer(folder).add_text(name, verbatim, step)

    def flush(self) -> None:
        for writer in self._writers.values():
            writer.flush()

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()

    def _writer(self, folder: str) -> tensorboardX.SummaryWriter:
        if folder not in self._writers:
            import tensorboardX  # up to a second, for it imports PyTorch where there is one

            self._writers[folder] = tensorboardX.SummaryWriter(
                os.fspath(self._summaries / folder),
                purge_step=self._purge_step,
                flush_secs=_SECONDS_BETWEEN_FLUSHES,
            )
        return self._writers[folder]


def eval_folder(dataset: str) -> str:
    """The summary folder of an evaluated data set; 'train' means the training data.

    >>> eval_folder('train'), eval_folder('held_out'), eval_folder('c4/en')
    ('eval_train', 'eval_test_held_out', 'eval_test_c4_en')
    >>> eval_folder('decode/prompts')
    'decode_test_prompts'
    """
    if dataset == "train":
        return "eval_train"
    kind, name = "eval", dataset
    if dataset.startswith(DECODE_PREFIX):
        kind, name = "decode", dataset.removeprefix(DECODE_PREFIX)
    return f"{kind}_test_" + re.sub(r"[^\w.-]", "_", name)
