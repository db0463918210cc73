"""Statistics over requests and scrapes: tail attribution, association, intervals, accuracy."""
