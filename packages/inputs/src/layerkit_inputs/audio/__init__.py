"""Readers of sounds and their transcripts; see `layerkit_inputs`."""
