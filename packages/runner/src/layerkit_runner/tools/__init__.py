"""Tools beside training, which the runner finds by the entry-point group `layerkit.commands`."""
