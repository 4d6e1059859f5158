"""The ranks of one engine: a scheduler orders copies, and each rank copies its share."""
