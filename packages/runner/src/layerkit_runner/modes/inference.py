"""Evaluation and decoding of checkpoints, beside a training job or after it.

    --mode=eval, decode              each new checkpoint, until the last; see `following.py`
    --mode=eval_once, decode_once    the newest one, or those of --restore_checkpoint_step

Nothing is done twice: evaluations leave records (`evaluation_records.py`), and finished outputs of
decoding are kept. So a job that was killed takes up where it was.
"""

from __future__ import annotations

import contextlib

import jax

from layerkit_runner.config.flags import RunOptions
from layerkit_runner.config.resolve import ResolvedExperiment
from layerkit_runner.data.data_agreement import check_same_data
from layerkit_runner.distributed.process_exchange import gather_values
from layerkit_runner.distributed.stop_signals import StopRequestedError, StopSignals
from layerkit_runner.errors import UsageError
from layerkit_runner.modes.checkpoint_reader import CheckpointReader
from layerkit_runner.modes.following import follow
from layerkit_runner.run_options import FOLLOWING_MODES
from layerkit_runner.trainer.build_programs import decode_programs, eval_programs, inputs_of
from layerkit_runner.trainer.job import Job, start_job


def run_inference(mode: str, resolved: ResolvedExperiment, options: RunOptions) -> int:
    """Evaluates or decodes as one of the four modes says; returns the exit code.

    Raises:
      UsageError: there is nothing to evaluate or to decode, no such checkpoint, or one of another
        model.
    """
    job = start_job(mode, resolved, options)
    with contextlib.closing(job.observers):
        reader = _reader(job)
        if mode in FOLLOWING_MODES:
            return _follow(reader)
        if options.restore_checkpoint_step is not None:
            reader.look_at(options.restore_checkpoint_step)
        else:
            # A newest one that was deleted while it was read has made way for a newer one.
            while reader.look_at_newest() is None:
                reader.check_there_is_one()
    return 0


def _follow(reader: CheckpointReader) -> int:
    job = reader.job
    leaving, saving = "leaving once the work at hand is done", "there is nothing to save here"
    with StopSignals(leaving=leaving, saving=saving) as signals:
        reader.is_asked_to_stop = signals.agreed_now
        try:
            follow(
                reader.directory,
                reader.look_at_newest,
                has_outputs=reader.has_outputs,
                own_last_step=job.task.train.num_train_steps,
                timeout_secs=job.options.follow_timeout_secs,
                signals=signals,
                report=job.observers.message,
            )
        except StopRequestedError:
            job.observers.message("the work at hand is given up, since its input does not answer")
            signals.agreed_now()
    return signals.exit_code


def _reader(job: Job) -> CheckpointReader:
    """What the mode does with a checkpoint; its data are opened, and compared among processes."""
    name, decodes = job.resolved.name, job.mode.startswith("decode")
    evaluates = not decodes or job.options.eval_during_decode
    evals = eval_programs(job) if evaluates else []
    if evaluates and not evals:
        raise UsageError(f"{name}.datasets() has no held-out input to evaluate")
    decodings = decode_programs(job) if decodes else []
    if decodes and not decodings:
        raise UsageError(f"{name}.decode_datasets() has nothing to decode")
    if jax.process_count() > 1:
        check_same_data(inputs_of(evals), gather_values)
        check_same_data(inputs_of(decodings), gather_values)
    return CheckpointReader(job, evals, decodings)
