"""The one paper that this project reproduces: its tables and figures beside measured ones, and its claims judged."""
