"""The experiments of the runs and the overrides of their fields."""

from __future__ import annotations

from typing import Any

from levels import VOCAB_SIZE

ONE_DEVICE = {"FPROP_DTYPE": "float32", "ICI_MESH_SHAPE": "[1,1,1]"}
# lm.pile.Pile126M and lm.pile.Lambada126M share checkpoints, so these fields must agree.
NARROW_PILE = {
    **ONE_DEVICE,
    "DCN_MESH_SHAPE": "[1,1,1]",
    "MODEL_DIMS": 72,
    "HIDDEN_DIMS": 288,
    "DIMS_PER_HEAD": 6,
    # 0.023 · √(768 / 72): the variance of products is the same as at full width.
    "INIT_STD": 0.075,
}
OF_PASSAGES = {"VOCAB_PATH": "DATA/vocab.model", "VOCAB_SIZE": VOCAB_SIZE}


def schedule(
    learning_rate: float, *, warmup: int, steps: int, summaries: int, saves: int
) -> dict[str, Any]:
    """Return the fields of a run of `steps` with a warm-up and a decay to the last step."""
    return {
        "LEARNING_RATE": learning_rate,
        "WARMUP_STEPS": warmup,
        "DECAY_START": warmup + 1,
        "DECAY_END": steps,
        "MAX_STEPS": steps,
        "SUMMARY_INTERVAL_STEPS": summaries,
        "EVAL_INTERVAL_STEPS": saves,
        "CHECKPOINT_EVERY_N_STEPS": saves,
    }


# Experiment and fields of each run. DATA is replaced by the folder that `data` writes.
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "pile": (
        "lm.pile.Pile126M",
        {
            "DATA_FORMAT": "local_text",
            "VOCAB_SIZE": 259,
            **NARROW_PILE,
            "MAX_SEQ_LEN": 64,
            "PERCORE_BATCH_SIZE": 8,
            "EVAL_NUM_BATCHES": 32,
            **schedule(5e-3, warmup=100, steps=4000, summaries=20, saves=400),
        },
    ),
    "c4": (
        "lm.c4.C4Spmd1BAdam4Replicas",
        {
            "TFDS_DATA_DIR": "DATA/tfds",
            **OF_PASSAGES,
            **ONE_DEVICE,
            "MODEL_DIMS": 80,
            "HIDDEN_DIMS": 320,
            "NUM_HEADS": 5,
            "DIMS_PER_HEAD": 16,
            "MAX_SEQ_LEN": 96,
            "PERCORE_BATCH_SIZE": 8,
            "EVAL_NUM_BATCHES": None,
            **schedule(5e-3, warmup=100, steps=1500, summaries=10, saves=150),
        },
    ),
    "lambada": (
        "lm.pile.Pile126M",
        {
            "TFDS_DATA_DIR": "DATA/tfds",
            **OF_PASSAGES,
            **NARROW_PILE,
            "MAX_SEQ_LEN": 96,
            "PERCORE_BATCH_SIZE": 8,
            "EVAL_NUM_BATCHES": None,
            **schedule(5e-3, warmup=100, steps=1500, summaries=10, saves=150),
            "CHECKPOINT_MAX_TO_KEEP": None,
            "task.train.save_step_zero": True,
        },
    ),
}
LAST_WORDS = {
    "TFDS_DATA_DIR": "DATA/tfds",
    **OF_PASSAGES,
    **NARROW_PILE,
    "MAX_SEQ_LEN": 96,
    "TARGET_LENGTH": 4,
    "PERCORE_BATCH_SIZE": 50,
}
