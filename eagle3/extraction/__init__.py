"""Hidden states from an engine: backends behind one protocol."""
