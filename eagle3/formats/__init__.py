"""Checkpoint formats of serving engines."""
