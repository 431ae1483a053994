"""Programs that prepare data, run as `python -m layerkit_inputs.tools.NAME`."""
