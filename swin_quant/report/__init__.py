"""Tables from recorded results: what was measured, never what was not."""
