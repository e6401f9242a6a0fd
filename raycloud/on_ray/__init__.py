"""Everything that touches Ray: cluster, fleet, actors, and the driver of a run."""
