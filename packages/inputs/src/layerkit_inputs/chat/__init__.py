"""Conversations: rows of messages, chat templates, and which tokens of a conversation have loss.

It imports `text` and `base`.
"""
