"""The machine under the load generator: its clock, its network, its processors and its limits."""
