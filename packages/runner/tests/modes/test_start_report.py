"""What is printed before the first step."""

from __future__ import annotations

import logging

import pytest

from layerkit_runner.modes.start_report import LayerNotes


def test_notes_of_layers_are_collected_once_and_printed_by_nobody_else(
    caplog: pytest.LogCaptureFixture,
):
    # caplog listens at the root logger, as absl does once TensorFlow is imported.
    logger = logging.getLogger("layerkit.attention")
    with caplog.at_level(logging.INFO, "layerkit"):
        with LayerNotes() as notes:
            logger.info("attention backend: %s", "xla")
            logger.info("attention backend: xla")
            logger.warning("slow")
        assert notes.lines == ["attention backend: xla", "slow"]
        assert caplog.messages == []
        logger.info("afterwards")
    assert caplog.messages == ["afterwards"]


def test_notes_of_layers_that_failed_are_told_as_always(caplog: pytest.LogCaptureFixture):
    def fail() -> None:
        with LayerNotes():
            logging.getLogger("layerkit.attention").warning("slow")
            raise ValueError("shapes do not fit")

    with pytest.raises(ValueError, match="shapes"):
        fail()
    assert caplog.messages == ["slow"]
