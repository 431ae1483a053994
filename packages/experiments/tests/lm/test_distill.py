"""Weights that a distillation trains."""

from __future__ import annotations

import re
from typing import Any

import pytest

from layerkit_experiments.lm.distill import Distill

PATHS = ("lm/w", "lm/lora_a", "teacher/w", "teacher/lora_a", "feature_0/w")


@pytest.mark.parametrize(
    ("fields", "trained"),
    [
        ({}, {"lm/w", "lm/lora_a", "feature_0/w"}),
        ({"LORA_RANK": 2}, {"lm/lora_a"}),
        ({"LORA_RANK": 2, "FEATURES": {0: 1}}, {"lm/lora_a", "feature_0/w"}),
    ],
)
def test_maps_of_features_are_trained_and_teacher_is_not(fields: Any, trained: set[str]):
    learner = Distill(HF_FOLDER="student", TEACHER="teacher", **fields).learner()

    def has_one(patterns: Any, path: str) -> bool:
        return any(re.fullmatch(pattern, path) for pattern in patterns)

    chosen = {p for p in PATHS if learner.trainable is None or has_one(learner.trainable, p)}
    assert {p for p in chosen if not has_one(learner.frozen, p)} == trained
