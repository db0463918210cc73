"""The composition: command line, configuration, one measured session, live views."""
