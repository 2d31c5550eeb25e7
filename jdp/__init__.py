"""jdp: data-parallel training for JAX."""
