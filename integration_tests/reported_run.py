"""An experiment for subprocesses that keeps a report of its run."""

from __future__ import annotations

from layerkit.config import Config
from layerkit_experiments.lm.quickstart import LocalText
from layerkit_runner import ReportPage


class Reported(LocalText):
    """The quickstart with a page that is written after every second."""

    def observers(self) -> list[Config]:
        return [Config(ReportPage, interval_secs=1.0)]
