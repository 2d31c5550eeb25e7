"""Evaluation: the metrics of a model, without a train state."""
