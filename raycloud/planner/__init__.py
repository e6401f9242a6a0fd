"""What shall happen: inventory and profile in, `Plan` out.

Everything here is arithmetic on values: no torch, no Ray, no clock, no I/O. The same input gives
the same plan.
"""
