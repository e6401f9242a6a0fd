"""The strategies of the source papers, one at a time and together, on one testbed."""
