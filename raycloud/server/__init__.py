"""Servers: rows of tables, what is done with them, and who asks for it. They know no torch."""
