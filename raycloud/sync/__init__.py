"""What travels: transports, the exchange of gradients, the control lane."""
