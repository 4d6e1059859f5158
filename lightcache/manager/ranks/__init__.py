"""The ranks of one engine: a scheduler orders their copies, and each makes its share."""
