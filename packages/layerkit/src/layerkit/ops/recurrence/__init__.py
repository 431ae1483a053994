"""Recurrences along rows of packed documents: convolutions, linear attention, diagonal states."""
