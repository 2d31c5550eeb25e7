"""Collectives: all-reduces behind one contract."""
