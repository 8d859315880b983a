"""Files of other programs: drafter checkpoints, hidden states, draft vocabularies."""
