"""What everything stands on: errors, files, progress, ranks."""

__version__ = "0.1.0"
