"""What moves bytes: keyed sockets, gloo, NCCL, the control lane, rendezvous, heartbeat."""
