"""The Python face: what `import swin_quant as sq` offers. The same objects and tasks that the commands use."""
