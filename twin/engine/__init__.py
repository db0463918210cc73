"""An engine of known speed: its steps as a run shows them, the fit to them, and a load played on it."""
