"""The peers' scripts, written the way their own documentation advises for speed."""
