"""Training, evaluation and decoding of layerkit models; the command `runner`.

Import public names from here: modules below this package may move between versions. A name loads
its module when it is first used, so that the command line answers a mistake without JAX.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from layerkit.config.lazy_names import lazy_names

if TYPE_CHECKING:
    from layerkit_runner.config.experiment import BaseExperiment as BaseExperiment
    from layerkit_runner.config.flags import Command as Command
    from layerkit_runner.config.flags import Mode as Mode
    from layerkit_runner.config.registry import list_experiments as list_experiments
    from layerkit_runner.config.requests import Override as Override
    from layerkit_runner.config.requests import ResolvedExperiment as ResolvedExperiment
    from layerkit_runner.errors import UsageError as UsageError
    from layerkit_runner.init_from.settings import InitFrom as InitFrom
    from layerkit_runner.init_from.settings import Source as Source
    from layerkit_runner.interface.experiments import get_experiment as get_experiment
    from layerkit_runner.interface.experiments import input_batches as input_batches
    from layerkit_runner.interface.loading import load as load
    from layerkit_runner.interface.training import MetricsTable as MetricsTable
    from layerkit_runner.interface.training import TrainResult as TrainResult
    from layerkit_runner.interface.training import train as train
    from layerkit_runner.observers.base import Observer as Observer
    from layerkit_runner.optim.early_stopping import EarlyStopping as EarlyStopping
    from layerkit_runner.optim.early_stopping import StoppingRule as StoppingRule
    from layerkit_runner.optim.learner import AuxiliaryOptimizer as AuxiliaryOptimizer
    from layerkit_runner.optim.learner import Learner as Learner
    from layerkit_runner.optim.weight_selection import VariationalNoise as VariationalNoise
    from layerkit_runner.partitioning.partitioner import PmapPartitioner as PmapPartitioner
    from layerkit_runner.partitioning.partitioner import SpmdPartitioner as SpmdPartitioner
    from layerkit_runner.run.executor import Executor as Executor
    from layerkit_runner.run.model.loaded_model import LoadedModel as LoadedModel
    from layerkit_runner.run.model.scoring import Score as Score
    from layerkit_runner.run.programs.decode_program import DecodeProgram as DecodeProgram
    from layerkit_runner.run.programs.eval_program import BaseProgram as BaseProgram
    from layerkit_runner.run.programs.eval_program import EvalProgram as EvalProgram
    from layerkit_runner.run.programs.lm_eval_program import LmEvalProgram as LmEvalProgram
    from layerkit_runner.run.programs.train_program import TrainProgram as TrainProgram
    from layerkit_runner.run_options import Flag as Flag
    from layerkit_runner.run_options import RunOptions as RunOptions
    from layerkit_runner.step.task import SingleTask as SingleTask
    from layerkit_runner.step.train_hparams import TrainHParams as TrainHParams
    from layerkit_runner.tools.pages.shards import draw_sharding as draw_sharding
    from layerkit_runner.tools.report.command import ReportPage as ReportPage
    from layerkit_runner.tools.report.page import report as report

# A function called as its module (`resolve`) cannot be here: once the module is imported, Python
# would find that under the name.
__getattr__, __dir__, __all__ = lazy_names(__name__)
