"""The report as one HTML file that needs no network: all measurements, node by node and picture by picture."""
