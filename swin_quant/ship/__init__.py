"""Packages: an artifact as a folder that runs without torch and without this package."""
