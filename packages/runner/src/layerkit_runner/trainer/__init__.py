"""What a job runs: training steps, evaluations, decoding."""

from layerkit_runner.trainer.decode import DecodeProgram
from layerkit_runner.trainer.eval import BaseProgram, EvalProgram
from layerkit_runner.trainer.train import TrainProgram, TrainPrograms

__all__ = ["BaseProgram", "DecodeProgram", "EvalProgram", "TrainProgram", "TrainPrograms"]
