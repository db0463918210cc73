"""The composition: command line, configuration, one measured session, live views."""

from importlib.metadata import version

VERSION = version("sidelight")
