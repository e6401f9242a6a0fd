"""The worker process: its loop, its data set, and how it goes from generation to generation."""
