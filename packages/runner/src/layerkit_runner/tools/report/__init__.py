"""Reports of runs: `runner report`, `runner status`, `layerkit_runner.report` and a status page."""
