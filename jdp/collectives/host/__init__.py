"""Host: collectives of CPU processes inside `jit`, and those over TCP."""
