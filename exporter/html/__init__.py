"""Pages of HTML that connect to nothing: of a run, of several runs, and live."""
