"""How selected entries are written."""
