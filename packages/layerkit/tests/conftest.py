"""Samples for type checkers, one of which is wrong on purpose, are not collected for doctests."""

collect_ignore = ["typing_samples"]
