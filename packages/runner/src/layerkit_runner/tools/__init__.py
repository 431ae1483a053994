"""Programs beside `runner`; each is run as `python -m layerkit_runner.tools.NAME --help`."""
