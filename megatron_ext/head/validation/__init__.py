"""Checks of the head's arguments, and their messages."""
