"""HTML pages that need no server: one file with its style, its scripts and its data."""
