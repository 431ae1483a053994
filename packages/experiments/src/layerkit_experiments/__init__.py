"""Named experiments: mostly values, little code."""
