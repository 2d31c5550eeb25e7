"""Join: processes with different amounts of data go on together."""
