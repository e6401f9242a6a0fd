"""What is fed: files into blocks, cached by content; rows out of them by id."""
