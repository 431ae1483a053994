"""What a job runs: training steps, evaluations, decoding."""

from layerkit_runner.programs.base import BaseProgram
from layerkit_runner.programs.decode import DecodeProgram
from layerkit_runner.programs.eval import EvalProgram
from layerkit_runner.programs.train import TrainProgram
from layerkit_runner.programs.turns import TrainPrograms

__all__ = ["BaseProgram", "DecodeProgram", "EvalProgram", "TrainProgram", "TrainPrograms"]
