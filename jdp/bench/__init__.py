"""`jdp bench`: measurements that are interleaved with what they are compared to."""
