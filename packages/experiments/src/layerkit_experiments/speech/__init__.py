"""Speech recognition experiments."""
