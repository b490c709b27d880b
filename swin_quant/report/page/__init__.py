"""The report as one HTML file that needs no network: what was measured, node by node and picture by picture."""
