"""Studies: which settings suit each arm, and which arm then accepts more."""
