"""Catalogue of gateways' pages and spans, one YAML each; recognition of a page's gateway."""
