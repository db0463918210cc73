"""How one request is written and how its reply is read, a module a protocol."""
