"""How exports come in: connections, bodies and turns, and what is seen in an export before it is logged."""
