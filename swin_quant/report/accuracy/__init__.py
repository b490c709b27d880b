"""The accuracy-delta table, from run cards: what was measured, never what was not."""
