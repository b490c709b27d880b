"""Tables of what was measured or found: columns are data, and one engine writes them in every form."""
