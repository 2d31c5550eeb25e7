"""Ops: the ways in which agreed operations move data, in order of preference."""
