"""The head's engine: logits and statistics chunk by chunk, the exchange between ranks, and the gradients."""
