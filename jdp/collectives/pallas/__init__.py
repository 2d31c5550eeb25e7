"""Pallas: the custom all-reduce of inference engines, as a GPU kernel."""
