"""Files of hidden states: their format, how they are published, waited for, read and reaped. Needs no engine."""
