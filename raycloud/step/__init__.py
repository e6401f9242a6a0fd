"""One replica's step as a transaction: forward, backward, exchange, commit."""
