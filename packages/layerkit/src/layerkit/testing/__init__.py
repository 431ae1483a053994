"""Checks that hold for every layer, for tests of this library and of code that builds on it."""

from layerkit.testing.fields import Change as Change
from layerkit.testing.fields import Example as Example
from layerkit.testing.fields import dead_fields as dead_fields
from layerkit.testing.fields import ignored_fields as ignored_fields
