"""Read-outs at a model's lm head, from hidden states or through the logits that it makes."""
