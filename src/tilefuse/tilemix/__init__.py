"""Attention whose score tiles are routed to a 16-bit or an INT8 path."""
