"""What people see of a run: its event log, ledger, scalars, summary, and texts made of them."""
