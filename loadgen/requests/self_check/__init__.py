"""The load generator's own error: can what it measured be trusted, and was the load the one that was asked for?."""
