"""Sharded models from and to folders as transformers has them."""
