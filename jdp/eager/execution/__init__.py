"""Execution: agreed operations, carried out."""
