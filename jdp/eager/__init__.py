"""Eager: collectives by name, agreed on before they run."""
