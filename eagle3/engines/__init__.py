"""Serving engines: their servers, what of them is installed, and what they are asked."""
