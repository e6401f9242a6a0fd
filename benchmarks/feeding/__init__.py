"""What `benchmarks.ingest` is made of: data, consumer, contestants, and a file for each section."""
