"""Inputs that generate their data: random tokens, digits, series and numbers in words.

It imports `arrays`, `text` and `base`.
"""
