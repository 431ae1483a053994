"""Contract tests of inputs, and small data sets for tests."""
