"""From one generation to the next: rendezvous, quorum, state transfer, catch-up, poison batches."""
