"""The flags of `runner`: the table of them, and what is parsed and printed from it."""
