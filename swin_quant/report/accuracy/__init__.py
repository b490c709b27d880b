"""The accuracy-delta table, made from the results in run cards alone."""
