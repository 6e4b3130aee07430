"""The command line: `main.py` routes, every other module is one command."""
