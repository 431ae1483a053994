"""Observers, which record a run; `base` has their protocol.

They import only `files` and `errors` of the runner. Importing this package loads neither JAX,
tensorboardX, matplotlib nor tqdm: the first use imports each of them.
"""

from layerkit_runner.observers.base import (
    DECODE_PREFIX,
    TOTAL_WEIGHT,
    Histogram,
    Observer,
    Observers,
    RunInfo,
    build_observers,
)
from layerkit_runner.observers.goodput import Goodput, GoodputLog
from layerkit_runner.observers.loss_curve import draw_loss_curve
from layerkit_runner.observers.metrics_log import Metrics, MetricsLog, metrics_path, read_metrics
from layerkit_runner.observers.progress import Progress
from layerkit_runner.observers.tensorboard import TensorBoard
from layerkit_runner.observers.throughput import StepWork, Throughput, memory_scalars, peak_flops

__all__ = [
    "DECODE_PREFIX",
    "TOTAL_WEIGHT",
    "Goodput",
    "GoodputLog",
    "Histogram",
    "Metrics",
    "MetricsLog",
    "Observer",
    "Observers",
    "Progress",
    "RunInfo",
    "StepWork",
    "TensorBoard",
    "Throughput",
    "build_observers",
    "draw_loss_curve",
    "memory_scalars",
    "metrics_path",
    "peak_flops",
    "read_metrics",
]
