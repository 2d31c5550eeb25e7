"""Elastic: replica groups that come, die and leave while the others train."""
