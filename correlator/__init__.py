"""The join: client spans with server time."""
