"""What everything stands on: errors, files, progress, ranks."""
