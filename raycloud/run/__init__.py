"""The driver of a run over a `Cluster`: on Ray, in threads, in virtual time."""
