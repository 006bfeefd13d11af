"""What comes into a model: what a caller says of sequences, and token ids that a rank alone must refuse."""
