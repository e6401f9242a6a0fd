"""Spaces and trials of a sweep, and who gets which seats; values in, values out."""
