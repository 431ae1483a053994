"""Digits: generated or from files, and a network that takes them."""

from __future__ import annotations

from typing import Any

from layerkit.config import target_of
from layerkit_experiments.vision.digits import Digits, Mnist
from layerkit_runner.config.experiment import reduced_values
from layerkit_runner.run.resolve import resolve


def test_both_have_the_same_network(num_params: Any):
    models = [resolve(cls()).task.model for cls in (Digits, Mnist)]
    assert models[0] == models[1]
    first, second = 5 * 5 * 16 + 16, 5 * 5 * 16 * 32 + 32
    dense, softmax = 7 * 7 * 32 * 128 + 128, 128 * 10 + 10
    assert num_params("vision.digits.Digits") == first + second + dense + softmax


def test_mnist_is_read_from_a_folder_and_synthetic_if_reduced():
    train, heldout = resolve(Mnist(DATA_FOLDER="fashion")).datasets
    assert (train.folder, train.split, train.is_training) == ("fashion", "train", True)
    assert (heldout.folder, heldout.split) == ("fashion", "test")
    (train, _) = resolve(Mnist(**reduced_values(Mnist))).datasets
    assert target_of(train).__name__ == "GeneratedDigits"
