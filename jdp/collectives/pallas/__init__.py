"""Pallas: the custom all-reduce of inference engines, as a GPU kernel."""

from jdp.collectives.pallas.choice import (
    Limits,
    Thresholds,
    Topology,
    should_use_custom,
)

__all__ = ["Limits", "Thresholds", "Topology", "should_use_custom"]
