"""Options of the commands, their checks and their schema."""
