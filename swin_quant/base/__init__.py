"""The lowest floor, which every package uses: errors, files, progress, ranks."""

__version__ = "0.1.0"
