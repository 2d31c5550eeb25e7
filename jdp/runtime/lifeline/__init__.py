"""Lifeline: every process learns at once when another one ends."""
