"""The tables of the report, one module a table or a family of them."""
