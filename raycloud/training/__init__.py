"""What computes: one replica's step as a transaction, the loop of rounds, the feed."""
