"""The benchmark on the testbed: contestants, scenarios, what is measured of them."""
