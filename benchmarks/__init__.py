"""Measurements against peers: the same work, on the same machine, in one interleaved run."""
