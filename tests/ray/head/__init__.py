"""Tests on one head, which a package of its own gives its end: see conftest.py."""
