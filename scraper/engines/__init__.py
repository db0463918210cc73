"""Catalogue of engines' metrics as canonical quantities, one YAML each; recognition of a page's engine."""
