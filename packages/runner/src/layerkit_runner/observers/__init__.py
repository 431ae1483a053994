"""Observers, which record a run; `base` has their protocol.

They import only `files` and `errors` of the runner. Importing this package loads neither JAX,
tensorboardX, matplotlib nor tqdm: the first use imports each of them.
"""

from layerkit_runner.observers.base import DECODE_PREFIX as DECODE_PREFIX
from layerkit_runner.observers.base import TOTAL_WEIGHT as TOTAL_WEIGHT
from layerkit_runner.observers.base import Histogram as Histogram
from layerkit_runner.observers.base import Observer as Observer
from layerkit_runner.observers.base import Observers as Observers
from layerkit_runner.observers.base import RunInfo as RunInfo
from layerkit_runner.observers.metrics_log import Metrics as Metrics
from layerkit_runner.observers.metrics_log import MetricsLog as MetricsLog
from layerkit_runner.observers.metrics_log import check_scalar_names as check_scalar_names
from layerkit_runner.observers.metrics_log import metrics_path as metrics_path
from layerkit_runner.observers.metrics_log import read_metrics as read_metrics
from layerkit_runner.observers.progress import Progress as Progress
from layerkit_runner.observers.speed import Goodput as Goodput
from layerkit_runner.observers.speed import GoodputLog as GoodputLog
from layerkit_runner.observers.speed import StepWork as StepWork
from layerkit_runner.observers.speed import Throughput as Throughput
from layerkit_runner.observers.speed import memory_scalars as memory_scalars
from layerkit_runner.observers.speed import peak_flops as peak_flops
from layerkit_runner.observers.tensorboard import TensorBoard as TensorBoard
