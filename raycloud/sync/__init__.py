"""How an update travels: buckets of gradients, and the strategy that sums them."""
