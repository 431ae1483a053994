"""--mode=eval and decode as real processes: beside a training job, stopped, killed, too slow."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from layerkit_runner.observers import metrics_path, read_metrics


@pytest.mark.slow
def test_evaluation_beside_a_training_job(processes: Any):
    follower = processes.start("--mode=eval")
    gate = processes.folder / "eval" / "heldout" / "step_{:08d}.json"
    trainer = processes.start(WAITS_FOR=gate)
    processes.ended(trainer)
    output = processes.ended(follower)
    assert f"waiting for the first checkpoint in {processes.folder}/checkpoints" in output
    assert "waiting for a checkpoint after step 2" in output
    assert "waiting for a checkpoint after step 6" not in output
    assert processes.evaluated() == [2, 4, 6]
    for step in (2, 4, 6):
        assert processes.read_evaluation(step) == processes.by_training(step)
    beside = read_metrics(metrics_path(processes.folder, mode="eval")).evals["heldout"]
    assert [line["step"] for line in beside] == [2, 4, 6]


@pytest.mark.slow
def test_decoding_beside_a_training_job(processes: Any):
    follower = processes.start("--mode=decode", "--eval_during_decode")
    gate = processes.folder / "decode" / "prompts" / "step_{:08d}.jsonl"
    processes.ended(processes.start(WAITS_FOR=gate))
    output = processes.ended(follower)
    outputs = sorted((processes.folder / "decode" / "prompts").glob("*.jsonl"))
    assert [path.name for path in outputs] == [f"step_0000000{step}.jsonl" for step in (2, 4, 6)]
    assert len({path.read_text() for path in outputs}) == 3  # each of other weights
    assert output.count("decoded step") == 3
    assert processes.evaluated() == [2, 4, 6]
    for step in (2, 4, 6):
        assert processes.read_evaluation(step) == processes.by_training(step)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_the_wait(processes: Any, number: signal.Signals):
    follower = processes.start("--mode=eval")
    processes.said(follower, "waiting for the first checkpoint")
    follower.send_signal(number)
    output = processes.ended(follower, 128 + number)
    assert f"{number.name}: leaving after the current program" in output


@pytest.mark.slow
def test_signal_ends_the_job_after_the_current_evaluation(processes: Any):
    processes.run(MAX_STEPS=4)
    gate = processes.folder.parent / "gate"
    # The second data set is decoded after, and evaluation of it is what waits.
    flags = ["--mode=decode", "--eval_during_decode"]
    (processes.folder / "decode" / "prompts" / "step_00000004.jsonl").unlink()
    follower = processes.start(*flags, SECOND_WAITS_FOR=gate)
    processes.wait_for(follower, processes.record(4).exists)
    follower.send_signal(signal.SIGTERM)
    processes.said(follower, "SIGTERM: leaving")
    gate.touch()
    output = processes.ended(follower, 143)
    assert processes.evaluated("second") == [4]
    assert "decoded step" not in output
    assert "decoded step 4" in processes.run(*flags, SECOND_WAITS_FOR=gate)


@pytest.mark.slow
def test_a_training_job_that_deletes_checkpoints_at_once(processes: Any):
    follower = processes.start("--mode=eval")
    processes.ended(processes.start(MAX_STEPS=60, MAX_TO_KEEP=1))
    output = processes.ended(follower)
    assert "DAMAGED" not in output
    steps = processes.evaluated()
    assert steps[-1] == 60
    for step in steps:
        assert processes.read_evaluation(step) == processes.by_training(step)


@pytest.mark.slow
def test_two_processes_follow_together(processes: Any):
    processes.run()
    outputs = [processes.ended(process) for process in processes.start_two("--mode=eval")]
    assert processes.read_evaluation(6) == pytest.approx(processes.by_training(6), rel=1e-6)
    assert "heldout: " in outputs[0]
    assert "heldout: " not in outputs[1]
    # One of them is asked to stop, and both leave.
    both = processes.start_two("--mode=eval", "--restore_checkpoint_dir=/nowhere/at/all")
    processes.said(both[0], "waiting for the first checkpoint")
    both[1].send_signal(signal.SIGTERM)
    for process in both:
        processes.ended(process, 143)
