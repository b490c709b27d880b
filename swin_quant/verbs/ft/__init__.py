"""Commands for who deploys on FasterTransformer: its front door main.py, its exports, its tuner files."""
