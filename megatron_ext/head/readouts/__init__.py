"""Read-outs of a distribution besides the loss of a label: chosen ids, top-k, top-p, divergences, the softmax."""
