"""Shards: a step whose bits do not depend on the number of replicas."""
