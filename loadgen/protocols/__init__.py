"""The table of the protocols, each a module that writes requests and reads replies."""
