"""The head with the same bits for any other tokens, chunks, layout and, by leaves, any number of ranks."""
