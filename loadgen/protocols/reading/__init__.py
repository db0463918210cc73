"""Reading of replies: events, text, timings and reasons of failures."""
