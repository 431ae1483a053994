"""Programs that prepare data; each is run as `python -m layerkit_inputs.tools.NAME --help`."""
