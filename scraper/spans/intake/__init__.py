"""Intake of exports over gRPC and HTTP: who may send, how much and how long, and the scan of an export."""
